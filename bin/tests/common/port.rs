//! Ports for tests.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// A port that nobody listens at and that the system gives to nobody who asks for any: another test cannot be given it in between.
pub(crate) fn free_port() -> u16 {
    /// Those of the system begin at 32768 unless it is told otherwise.
    const PORTS: std::ops::Range<u16> = 10_000..32_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16;
    loop {
        // Of each process its own, and of each test in it.
        let place = first.wrapping_mul(61).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + place % (PORTS.end - PORTS.start);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
