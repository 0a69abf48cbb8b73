//! Connections before they belong to a group: every read and write has a deadline, and every message a size limit.

mod proof;

use std::fmt;
use std::io::{self, Read};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

pub(crate) use self::proof::HandshakeStep;
use self::proof::ServerHandshake;
use super::connect_error::{ConnectError, ConnectResult};
use super::handshake::{Client, ClientClaim, Credentials, OPENING, Verdict, is_plain};
use super::stream::Stream;
use crate::base::fingerprint;
use crate::base::last_message::LastMessage;
use crate::connection::tls::Session;

/// Send buffer of a data connection between ranks of one host. The kernel's automatic size grows to several MiB, which
/// falls out of the processor's cache before the other rank reads it: a broadcast of 64 MiB between two ranks took 1.6
/// times as long. Between hosts the automatic size is right, since it follows the delay of the route.
const LOCAL_SEND_BUFFER: usize = 512 * 1024;

/// Waits until one of `fds` is ready and returns which are; all false at the deadline.
pub(crate) fn wait_any(fds: &[(BorrowedFd<'_>, PollFlags)], deadline: Instant) -> io::Result<Vec<bool>> {
    let mut polled: Vec<_> = fds.iter().map(|(fd, flags)| PollFd::new(fd, *flags)).collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout =
            Timespec { tv_sec: left.as_secs().min(1 << 30) as _, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut polled, Some(&timeout)) {
            Ok(0) if !left.is_zero() => {}
            Ok(_) => return Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Error of rustls about our own key, which no user can cause.
fn unusable(error: rustls::Error) -> ConnectError {
    ConnectError::Malformed(error.to_string())
}

/// Returns whether the call that failed with `error` would block; false where it was interrupted, and can be repeated at
/// once.
fn would_block(error: io::Error) -> ConnectResult<bool> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(false),
        io::ErrorKind::WouldBlock => Ok(true),
        _ => Err(error.into()),
    }
}

/// Advances a TLS handshake; returns the poll events that it waits for, `None` when it is done.
fn advance_tls_handshake(session: &mut Session, stream: &Stream) -> ConnectResult<Option<PollFlags>> {
    loop {
        match session.handshake(stream.socket()) {
            Ok(()) => return Ok(None),
            Err(error) => {
                if would_block(error)? {
                    let flags = if session.has_outgoing() { PollFlags::OUT } else { PollFlags::IN };
                    return Ok(Some(flags));
                }
            }
        }
    }
}

/// Returns the length of a message, which the four bytes before it announce; more than `limit` is an error.
pub(crate) fn message_len(announced: [u8; 4], limit: usize) -> ConnectResult<usize> {
    let length = u32::from_le_bytes(announced) as usize;
    if length > limit {
        return Err(ConnectError::Malformed(format!(
            "a message of {length} bytes, where at most {limit} are allowed"
        )));
    }
    Ok(length)
}

/// Parses a complete message.
pub(crate) fn parse<T: DeserializeOwned>(message: &[u8]) -> ConnectResult<T> {
    serde_json::from_slice(message)
        .map_err(|error| ConnectError::Malformed(format!("an unknown message ({error})")))
}

/// Becomes readable when waiting on a connection is cancelled.
pub(crate) trait Stop: AsFd + fmt::Debug + Send + Sync {}

impl<T: AsFd + fmt::Debug + Send + Sync> Stop for T {}

/// A TCP connection that is not yet part of a group.
#[derive(Debug)]
pub(crate) struct HandshakeStream {
    stream: Arc<Stream>,
    stop: Option<Arc<dyn Stop>>,
    /// On the listening side: how far the handshake has come.
    proof: ServerHandshake,
    /// What has arrived of a message that [`Self::try_receive_frame`] receives.
    incoming: Vec<u8>,
}

impl From<Arc<Stream>> for HandshakeStream {
    fn from(stream: Arc<Stream>) -> Self {
        Self { stream, stop: None, proof: ServerHandshake::default(), incoming: Vec::new() }
    }
}

impl HandshakeStream {
    pub(crate) fn new(stream: TcpStream, stop: Option<Arc<dyn Stop>>) -> ConnectResult<Self> {
        // The error of macOS for a connection that has ended already.
        let ended = |error: &io::Error| error.raw_os_error() == Some(Errno::INVAL.raw_os_error());
        stream
            .set_nodelay(true)
            .map_err(|error| if ended(&error) { ConnectError::Closed } else { error.into() })?;
        stream.set_nonblocking(true)?;
        Ok(Self { stop, ..Self::from(Arc::new(Stream::from(stream))) })
    }

    /// Connects and proves that this rank belongs to the job; returns the server's verdict.
    pub(crate) fn connect(
        address: SocketAddr,
        credentials: &Credentials,
        caller: ClientClaim,
        deadline: Instant,
    ) -> ConnectResult<(Self, Verdict)> {
        let mut wire = Self::dial(address, None, deadline)?;
        let verdict = wire.authenticate(credentials, caller, deadline)?;
        Ok((wire, verdict))
    }

    /// Connects; gives up when `stop` becomes readable.
    pub(crate) fn dial(
        address: SocketAddr,
        stop: Option<Arc<dyn Stop>>,
        deadline: Instant,
    ) -> ConnectResult<Self> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        let begun = socket.connect(&address.into());
        let wire = Self { stop, ..Self::from(Arc::new(Stream::from(TcpStream::from(socket)))) };
        match begun {
            Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {
                wire.wait(PollFlags::OUT, deadline)?;
                wire.stream.socket().take_error()?.map_or(Ok(()), Err)?;
            }
            other => other?,
        }
        // Where nobody listens, a free local port may connect to itself, and then keep rank 0 from listening there.
        if wire.stream.socket().local_addr()? == wire.stream.socket().peer_addr()? {
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
        }
        Ok(wire)
    }

    /// Proves that this rank belongs to the job; returns the server's verdict.
    pub(crate) fn authenticate(
        &mut self,
        credentials: &Credentials,
        caller: ClientClaim,
        deadline: Instant,
    ) -> ConnectResult<Verdict> {
        let client = match credentials.tls(|| self.is_local())? {
            Some(identity) => {
                let client = Client::encrypting(credentials, caller)?;
                self.write(client.opening(), deadline)?;
                self.secure(Session::new(identity.client().map_err(unusable)?), &client, deadline)?;
                client
            }
            None => {
                let client = Client::new(credentials, caller)?;
                self.write(client.opening(), deadline)?;
                client
            }
        };
        let (claim, claimed) = client.claim(self.read(deadline)?)?;
        self.write(&claim, deadline)?;
        claimed.check(&self.read(deadline)?)
    }

    /// Runs the TLS handshake; everything is encrypted after it.
    fn secure(&mut self, mut session: Session, client: &Client<'_>, deadline: Instant) -> ConnectResult<()> {
        loop {
            match advance_tls_handshake(&mut session, &self.stream) {
                Ok(None) => break self.stream.secure(session),
                Ok(Some(flags)) => self.wait(flags, deadline)?,
                Err(_) if is_plain(session.unprocessed()) => {
                    let (mut opening, first) = ([0; OPENING], session.unprocessed());
                    let known = first.len().min(OPENING);
                    opening[..known].copy_from_slice(&first[..known]);
                    self.fill(&mut opening[known..], deadline)?;
                    return Err(client.refused(&opening));
                }
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }

    pub(crate) fn read<const N: usize>(&mut self, deadline: Instant) -> ConnectResult<[u8; N]> {
        let mut message = [0; N];
        self.fill(&mut message, deadline)?;
        Ok(message)
    }

    /// Reads the last words of a rank whose group has ended; `first` is their first byte, where it was read already.
    /// `None` where the rank sends something else.
    pub(crate) fn read_last_words(&mut self, first: Option<u8>, deadline: Instant) -> Option<LastMessage> {
        let mut words = [0; fingerprint::LEN];
        let known = first.iter().len();
        words[..known].copy_from_slice(first.as_slice());
        self.fill(&mut words[known..], deadline).ok()?;
        LastMessage::decode(&words)
    }

    fn fill(&mut self, buffer: &mut [u8], deadline: Instant) -> ConnectResult<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.stream.recv(&mut buffer[filled..]) {
                Ok(0) => return Err(ConnectError::Closed),
                Ok(count) => filled += count,
                Err(error) => self.after(error, PollFlags::IN, deadline)?,
            }
        }
        Ok(())
    }

    pub(crate) fn write(&mut self, message: &[u8], deadline: Instant) -> ConnectResult<()> {
        let mut sent = 0;
        while sent < message.len() {
            match self.stream.send(&message[sent..], &[]) {
                Ok(count) => sent += count,
                Err(error) => self.after(error, PollFlags::OUT, deadline)?,
            }
        }
        Ok(())
    }

    /// Waits until the call that failed with `error` can be repeated.
    fn after(&self, error: io::Error, flags: PollFlags, deadline: Instant) -> ConnectResult<()> {
        match would_block(error)? {
            true => self.wait(flags, deadline),
            false => Ok(()),
        }
    }

    fn wait(&self, flags: PollFlags, deadline: Instant) -> ConnectResult<()> {
        let mut fds = vec![(self.stream.as_fd(), flags)];
        fds.extend(self.stop.iter().map(|stop| (stop.as_fd(), PollFlags::IN)));
        let ready = wait_any(&fds, deadline)?;
        match (ready[0], ready.get(1)) {
            (_, Some(true)) => Err(ConnectError::Stopped),
            (false, _) => Err(ConnectError::TimedOut),
            _ => Ok(()),
        }
    }

    /// Sends a message: its length in four bytes, then JSON.
    pub(crate) fn send<T: Serialize>(&mut self, message: &T, deadline: Instant) -> ConnectResult<()> {
        self.write(&Self::frame(message)?, deadline)
    }

    /// Encodes a message as it is sent.
    pub(crate) fn frame<T: Serialize>(message: &T) -> ConnectResult<Vec<u8>> {
        let mut frame = vec![0; 4];
        serde_json::to_writer(&mut frame, message)
            .map_err(|error| ConnectError::Malformed(error.to_string()))?;
        let length = u32::try_from(frame.len() - 4)
            .map_err(|_| ConnectError::Malformed("too long a message".into()))?;
        frame[..4].copy_from_slice(&length.to_le_bytes());
        Ok(frame)
    }

    /// Receives a message of at most `limit` bytes; a longer one is refused before memory is allocated for it.
    pub(crate) fn receive<T: DeserializeOwned>(
        &mut self,
        limit: usize,
        deadline: Instant,
    ) -> ConnectResult<T> {
        parse(&self.receive_frame(limit, deadline)?[4..])
    }

    /// Receives a message as [`Self::receive`] does; returns it as it was sent.
    pub(crate) fn receive_frame(&mut self, limit: usize, deadline: Instant) -> ConnectResult<Vec<u8>> {
        let announced = self.read(deadline)?;
        let mut frame = vec![0; 4 + message_len(announced, limit)?];
        frame[..4].copy_from_slice(&announced);
        self.fill(&mut frame[4..], deadline)?;
        Ok(frame)
    }

    /// Receives a message of at most `limit` bytes as far as it has arrived. Returns it, as it was sent, once it is complete; nothing
    /// else is to be received before that.
    pub(crate) fn try_receive_frame(&mut self, limit: usize) -> ConnectResult<Option<Vec<u8>>> {
        loop {
            let filled = self.incoming.len();
            let whole = match self.incoming.first_chunk() {
                Some(announced) => 4 + message_len(*announced, limit)?,
                None => 4,
            };
            if filled >= 4 && filled == whole {
                return Ok(Some(std::mem::take(&mut self.incoming)));
            }
            self.incoming.resize(whole, 0);
            let received = self.stream.recv(&mut self.incoming[filled..]);
            self.incoming.truncate(filled + *received.as_ref().unwrap_or(&0));
            match received {
                Ok(0) => return Err(ConnectError::Closed),
                Ok(_) => {}
                Err(error) => {
                    if would_block(error)? {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Returns whether something has arrived that was not read yet, the end of the connection included.
    pub(crate) fn is_readable(&self) -> bool {
        let now = Instant::now();
        wait_any(&[(self.stream.as_fd(), PollFlags::IN)], now).is_ok_and(|ready| ready[0])
    }

    /// Returns false where the other side has closed the connection and no unread data is left.
    pub(crate) fn is_open(&self) -> bool {
        self.has_arrived().is_some()
    }

    /// Returns whether data has arrived that was not read yet; `None` where the other side has closed the connection and none is
    /// left.
    pub(crate) fn has_arrived(&self) -> Option<bool> {
        match self.stream.socket().peek(&mut [0]) {
            Ok(count) => (count > 0).then_some(true),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Some(false),
                _ => None,
            },
        }
    }

    /// Returns another handle of this connection, for another thread.
    pub(crate) fn clone_handle(&self) -> Self {
        Self { stop: self.stop.clone(), ..Self::from(self.stream.clone()) }
    }

    /// Keeps the connection usable when the acceptor that accepted it stops.
    pub(crate) fn detach(&mut self) {
        self.stop = None;
    }

    /// Closes the connection so that the other side can still read what was sent: with unread input, the system would
    /// reset it.
    pub(crate) fn close_gracefully(&mut self) {
        self.stream.shutdown(Shutdown::Write);
        let mut rest = [0; 1024];
        for _ in 0..64 {
            if !matches!(self.stream.socket().read(&mut rest), Ok(1..)) {
                break;
            }
        }
    }

    /// Shuts the connection down in both directions.
    pub(crate) fn shutdown(&self) {
        self.stream.shutdown(Shutdown::Both);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// For socket options.
    pub(crate) fn socket(&self) -> &TcpStream {
        self.stream.socket()
    }

    pub(crate) fn peer(&self) -> ConnectResult<SocketAddr> {
        Ok(self.stream.socket().peer_addr()?)
    }

    /// Returns whether the other side runs on this host.
    pub(crate) fn is_local(&self) -> ConnectResult<bool> {
        self.is_local_to(self.peer()?.ip().to_canonical())
    }

    /// Returns whether the other side, which is at this address, runs on this host.
    pub(crate) fn is_local_to(&self, peer: IpAddr) -> ConnectResult<bool> {
        Ok(peer.is_loopback() || peer == self.stream.socket().local_addr()?.ip().to_canonical())
    }

    /// Returns the non-blocking stream, set up for data.
    pub(crate) fn into_data_stream(self) -> Arc<Stream> {
        if self.is_local().unwrap_or(false) {
            // Without this the connection is slower, but works.
            let _ = SockRef::from(self.stream.socket()).set_send_buffer_size(LOCAL_SEND_BUFFER);
        }
        self.stream
    }

    /// Returns the non-blocking stream, which this connection goes on using.
    pub(crate) fn stream(&self) -> Arc<Stream> {
        self.stream.clone()
    }

    /// Returns the non-blocking stream.
    pub(crate) fn into_stream(self) -> Arc<Stream> {
        self.stream
    }

    /// Sends as much of `words` as is possible without waiting; errors are ignored.
    pub(crate) fn try_send(&self, words: &[u8]) {
        self.stream.say(words);
    }
}
