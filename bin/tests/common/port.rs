//! Ports for tests.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns a port on which nothing listens, outside the system's ephemeral range, so that no other test is assigned
/// it meanwhile.
pub(crate) fn free_port() -> u16 {
    /// The system's ephemeral ports start at 32768 by default.
    const PORTS: std::ops::Range<u16> = 10_000..32_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16;
    loop {
        // Different for each process, and for each call within it.
        let place = first.wrapping_mul(61).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + place % (PORTS.end - PORTS.start);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
