//! Which of its addresses a host is reached at.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

/// How long to wait before a name is asked for again.
const PAUSE: Duration = Duration::from_millis(200);

/// The address with which this host goes to another one, its own name included: others that know that one reach this host
/// there. A name may not be known yet, as those of pods that are just started: it is asked for until the deadline.
pub(crate) fn address_towards(host: &str, port: u16, deadline: Instant) -> Result<IpAddr, String> {
    loop {
        let reason = match (host, port).to_socket_addrs().map(|mut found| found.next()) {
            Ok(Some(address)) => {
                return own_address(address).map_err(|reason| format!("there is no way to it ({reason})"));
            }
            Ok(None) => "the name has no address".to_string(),
            Err(reason) => format!("the name has no address ({reason})"),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(reason);
        }
        std::thread::sleep(PAUSE.min(left));
    }
}

fn own_address(towards: SocketAddr) -> std::io::Result<IpAddr> {
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
        assert!(address_towards("127.0.0.1", 80, now).unwrap().is_loopback());
        assert!(address_towards("no such host", 80, now).unwrap_err().starts_with("the name has no address"));
    }
}
