//! State of a TCP connection in the kernel.
#![allow(unsafe_code, reason = "rustix has no safe form of these two calls")]

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::platform::send_queue::SendQueue;

/// Words of `struct tcp_info` (linux/tcp.h) up to the last one that is read; the kernel fills as many as it is given.
const WORDS: usize = 15;
/// The second word's first byte is `tcpi_retransmits` on a little-endian machine; so the first four words are read as bytes.
const RETRANSMITS: usize = 2;
const SND_MSS: usize = 4;
const LAST_ACK_RECV: usize = 14;

/// Returns what was sent and not acknowledged; `None` where the system does not say.
pub(crate) fn send_queue(stream: &TcpStream) -> Option<SendQueue> {
    let mut words = [0_u32; WORDS];
    let mut len = size_of_val(&words) as libc::socklen_t;
    let fd = stream.as_raw_fd();
    // SAFETY: the system writes at most `len` bytes, for which there is room.
    let status = unsafe {
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, words.as_mut_ptr().cast(), &raw mut len)
    };
    if status != 0 || (len as usize) < size_of_val(&words) {
        return None;
    }
    let mut bytes: libc::c_int = 0;
    // SAFETY: the system writes one number.
    let status = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    let bytes = u64::try_from(bytes).ok().filter(|_| status == 0)?;
    let [first, ..] = words;
    let retransmissions = first.to_ne_bytes()[RETRANSMITS];
    let silence = Duration::from_millis(words[LAST_ACK_RECV].into());
    Some(SendQueue { bytes, retransmissions, silence, segment: words[SND_MSS] })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_a_peer_does_not_read_is_acknowledged_until_its_buffer_is_full() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        let queue = send_queue(&stream).unwrap();
        assert_eq!((queue.bytes, queue.retransmissions), (0, 0));
        assert!(queue.segment >= 536, "{queue:?}");
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 65536]).is_ok() {}
        let queue = send_queue(&stream).unwrap();
        // The peer's system answers, so that nothing is sent again.
        assert!(queue.bytes > 0 && queue.retransmissions == 0, "{queue:?}");
        drop(peer);
    }
}
