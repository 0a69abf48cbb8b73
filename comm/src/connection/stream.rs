//! Non-blocking connection between two ranks, as their group uses it, encrypted or not.

use std::io::{self, IoSlice};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, OnceLock};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use crate::base::lock;
use crate::connection::tls::Session;
use crate::platform::socket::{NO_SIGNAL, without_signals};

#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpStream,
    /// Large, and most connections have none.
    session: OnceLock<Box<Mutex<Session>>>,
}

impl From<TcpStream> for Stream {
    fn from(socket: TcpStream) -> Self {
        without_signals(&socket);
        Self { socket, session: OnceLock::new() }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Stream {
    /// For addresses and options. Data is sent and received through the methods here.
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Encrypts everything from here on.
    pub(crate) fn secure(&self, session: Session) {
        // Never set before: a connection has one TLS handshake.
        let _ = self.session.set(Box::new(Mutex::new(session)));
    }

    /// Sends `head`, then `body`, as far as the send buffer has space. Where it has none, the same bytes must be offered
    /// again.
    pub(crate) fn send(&self, head: &[u8], body: &[u8]) -> io::Result<usize> {
        if let Some(session) = self.session.get() {
            return lock(session).send(&self.socket, head, body);
        }
        let parts = [IoSlice::new(head), IoSlice::new(body)];
        let flags = NO_SIGNAL | SendFlags::DONTWAIT;
        Ok(sendmsg(&self.socket, &parts, &mut SendAncillaryBuffer::default(), flags)?)
    }

    /// Reads what has arrived into `into`, which is not empty; returns 0 at the end of the connection.
    pub(crate) fn recv(&self, into: &mut [u8]) -> io::Result<usize> {
        match self.session.get() {
            Some(session) => lock(session).recv(&self.socket, into),
            None => Ok(recv(&self.socket, into, RecvFlags::DONTWAIT)?.0),
        }
    }

    /// Sends as much of `words` as is possible without waiting; errors are ignored.
    pub(crate) fn say(&self, words: &[u8]) {
        // A peer that reads nothing now, or has left, learns it in another way.
        let _ = match self.session.get() {
            Some(session) => lock(session).try_send(&self.socket, words),
            None => self.send(words, &[]).map(drop),
        };
    }

    /// Waits until `into` is full.
    #[cfg(test)]
    pub(crate) fn fill(&self, into: &mut [u8]) {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut filled = 0;
        while filled < into.len() {
            match self.recv(&mut into[filled..]) {
                Ok(0) => panic!("the connection has ended"),
                Ok(got) => filled += got,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let minute = crate::base::timespec::timespec(std::time::Duration::from_secs(60));
                    let ready = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&minute)).unwrap();
                    assert_eq!(ready, 1, "nothing came");
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// As [`TcpStream::shutdown`]. Errors are ignored, for example where the connection is closed already.
    pub(crate) fn shutdown(&self, how: Shutdown) {
        let _ = self.socket.shutdown(how);
    }
}
