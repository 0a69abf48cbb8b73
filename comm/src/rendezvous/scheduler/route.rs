//! Which of its addresses a host is reached at.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long to wait before a name is asked for again.
const PAUSE: Duration = Duration::from_millis(200);
/// How long a name may take in any case: one that this host knows itself takes no longer.
const LEAST: Duration = Duration::from_millis(500);

/// The addresses of a host. The system cannot be told how long to ask for a name: past the deadline the thread that asks is
/// left behind, and ends by itself.
///
/// # Errors
/// What the system says of the name.
pub fn addresses(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let (name, (sender, found)) = (host.to_owned(), channel());
    let ask = move || {
        let _ = sender.send((name.as_str(), port).to_socket_addrs().map(Vec::from_iter));
    };
    std::thread::Builder::new().name("girandole-name".into()).spawn(ask)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(LEAST);
    found.recv_timeout(left).unwrap_or_else(|_| Err(io::Error::other("no name server answers")))
}

/// The address with which this host goes to another one, its own name included: others that know that one reach this host
/// there, on `several` hosts. A name may not be known yet, as those of pods that are just started: it is asked for until the
/// deadline.
///
/// # Errors
/// Why there is none.
pub fn address_towards(host: &str, port: u16, several: bool, deadline: Instant) -> Result<IpAddr, String> {
    loop {
        let reason = match addresses(host, port, deadline) {
            Ok(found) if !found.is_empty() => {
                let found = if several { seen_by_others(host, found)? } else { found };
                return own_address(found[0]).map_err(|reason| format!("there is no way to it ({reason})"));
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

/// Of the addresses of a host those at which other hosts reach it, one at least. Debian and others give a host's own name an
/// address of loopback in `/etc/hosts`. Who gives such an address, or `localhost`, means it: several nodes may be one host.
///
/// # Errors
/// There is none but loopback's.
pub fn seen_by_others(host: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, String> {
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

fn own_address(towards: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if towards.is_ipv4() { [0, 0, 0, 0].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0))?;
    // Nothing is sent: the system only looks up the way.
    socket.connect(towards)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_reached_from_loopback_and_a_name_that_is_none_is_told() {
        let now = Instant::now();
        assert!(address_towards("127.0.0.1", 80, true, now).unwrap().is_loopback());
        assert!(address_towards("localhost", 80, true, now).unwrap().is_loopback());
        let no_such = address_towards("no such host", 80, false, now).unwrap_err();
        assert!(no_such.starts_with("the name has no address"), "{no_such}");
    }

    #[test]
    fn a_name_leads_to_where_other_hosts_reach_the_host() {
        let addresses = |found: &[&str]| found.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
        let [debian, own] = ["127.0.1.1:9", "10.0.0.1:9"];
        let seen = |host: &str, found: &[&str]| seen_by_others(host, addresses(found));
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
