//! Ports for tests.

use std::net::{TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns a TCP port on which nothing listens, and which no other test gets: it is outside the range from which the system
/// assigns ports, and the UDP port of the same number is held until this process ends, as a sign to others.
pub(crate) fn free_port() -> u16 {
    /// The system assigns ports from 32768 on by default.
    const PORTS: std::ops::Range<u16> = 10_000..32_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16;
    loop {
        let offset = first.wrapping_mul(61).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + offset % (PORTS.end - PORTS.start);
        let Ok(sign) = UdpSocket::bind(("127.0.0.1", port)) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            std::mem::forget(sign);
            return port;
        }
    }
}
