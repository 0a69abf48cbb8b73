//! Host name lookup, and the local address from which another host is reached.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long to wait before a name is looked up again.
const PAUSE: Duration = Duration::from_millis(200);
const LOOPBACK_IS_DOWN: &str = "the loopback interface is down; bring it up (ip link set lo up)";
/// Limit for a connection of this process to itself, which the system makes at once.
const OWN_CONNECTION: Duration = Duration::from_secs(2);
/// Minimum time for a lookup, whatever the deadline: enough for a name that this host knows itself.
const MIN_LOOKUP: Duration = Duration::from_millis(500);

/// Returns the addresses of a host. The system's lookup has no time-out: past the deadline the thread that runs it is
/// abandoned, and ends by itself.
///
/// # Errors
/// The system's error for the name, or that no name server answers in time.
pub fn addresses(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let (name, (sender, found)) = (host.to_owned(), channel());
    let ask = move || {
        let _ = sender.send((name.as_str(), port).to_socket_addrs().map(Vec::from_iter));
    };
    std::thread::Builder::new().name("girandole-name".into()).spawn(ask)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(MIN_LOOKUP);
    found.recv_timeout(left).unwrap_or_else(|_| Err(io::Error::other("no name server answers")))
}

/// Returns the local address from which this host reaches `host`, which may be its own name. With `several` hosts, ranks
/// on others that know `host` reach this host at that address. A name may not resolve yet, such as that of a pod that has
/// just been started: it is looked up again until the deadline.
///
/// # Errors
/// The reason why there is none.
pub fn local_address_towards(
    host: &str,
    port: u16,
    several: bool,
    deadline: Instant,
) -> Result<IpAddr, String> {
    loop {
        let reason = match addresses(host, port, deadline) {
            Ok(found) if !found.is_empty() => {
                let found = if several { without_loopback(host, found)? } else { found };
                // A name may have addresses of a kind that this host does not use, such as IPv6.
                let ways = found.iter().map(|address| own_address(*address));
                let way = ways.reduce(Result::or).unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()));
                return way.map_err(|reason| format!("there is no way to it ({reason})"));
            }
            Ok(_) => "the name has no address".to_string(),
            Err(reason) => format!("the name has no address ({reason})"),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(reason);
        }
        std::thread::sleep(PAUSE.min(left));
    }
}

/// Keeps the addresses of a host at which other hosts reach it, at least one. Debian and others give a host's own name a
/// loopback address in `/etc/hosts`, which is removed. Where `host` itself is such an address, or `localhost`, it is
/// intended and kept: several nodes may be one host.
///
/// # Errors
/// Where there are only loopback addresses.
pub fn without_loopback(host: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, String> {
    let is_meant = host.parse::<IpAddr>().is_ok() || host.eq_ignore_ascii_case("localhost");
    let (loopback, others): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|address| !is_meant && address.ip().to_canonical().is_loopback());
    match loopback.first() {
        Some(address) if others.is_empty() => {
            Err(format!("it is {} here (/etc/hosts), which no other host reaches", address.ip()))
        }
        _ => Ok(others),
    }
}

/// Fails for a loopback address that nothing reaches, because the interface is down: listening on it succeeds all the same, and
/// there may be a route to it. So this process connects to itself.
///
/// # Errors
/// What is wrong.
pub(crate) fn check_loopback(ip: IpAddr) -> crate::Result<()> {
    if !ip.to_canonical().is_loopback() {
        return Ok(());
    }
    let listener = TcpListener::bind((ip, 0)).and_then(|listener| Ok((listener.local_addr()?, listener)));
    // Whoever listens there says what is wrong.
    let Ok((address, _listener)) = listener else { return Ok(()) };
    match TcpStream::connect_timeout(&address, OWN_CONNECTION) {
        Err(error)
            if [io::ErrorKind::TimedOut, io::ErrorKind::NetworkUnreachable].contains(&error.kind()) =>
        {
            Err(crate::Error::system(format!("reaching {ip} on this host"), LOOPBACK_IS_DOWN))
        }
        _ => Ok(()),
    }
}

fn own_address(towards: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if towards.is_ipv4() { [0, 0, 0, 0].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0))?;
    // Nothing is sent: the system only looks up the route.
    socket.connect(towards)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_reached_from_loopback_and_a_name_that_is_none_is_told() {
        let now = Instant::now();
        assert!(local_address_towards("127.0.0.1", 80, true, now).unwrap().is_loopback());
        assert!(local_address_towards("localhost", 80, true, now).unwrap().is_loopback());
        let no_such = local_address_towards("no such host", 80, false, now).unwrap_err();
        assert!(no_such.starts_with("the name has no address"), "{no_such}");
    }

    #[test]
    fn a_name_leads_to_where_other_hosts_reach_the_host() {
        let addresses = |found: &[&str]| found.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
        let [debian, own] = ["127.0.1.1:9", "10.0.0.1:9"];
        let seen = |host: &str, found: &[&str]| without_loopback(host, addresses(found));
        assert_eq!(seen("node-a", &[debian, own, "[::1]:9"]), Ok(addresses(&[own])));
        assert_eq!(
            seen("node-a", &[debian]).unwrap_err(),
            "it is 127.0.1.1 here (/etc/hosts), which no other host reaches"
        );
        for meant in ["127.0.1.1", "localhost", "::1"] {
            assert_eq!(seen(meant, &[debian]), Ok(addresses(&[debian])));
        }
    }
}
