//! TLS session of one connection. It never blocks, and holds nothing back: bytes count as sent when the system has
//! accepted them, and no more is read than the record that is needed, so that a socket with nothing to read means that
//! nothing has arrived.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;

use rustls::Connection;

/// Length of a record's header.
const HEADER: usize = 5;
/// The longest record (RFC 8446, 5.2).
const MAX_RECORD: usize = HEADER + 16384 + 256;
/// The longest record in a handshake, which takes a few hundred bytes: memory is allocated for it before the other side
/// has proved anything.
const MAX_HANDSHAKE: usize = 4096;
/// Bytes that are encrypted at once: enough for few system calls, and few enough to stay in the processor's cache.
const CHUNK: usize = 64 * 1024;
/// Type of a client's first record, and of the answer; later records are data or one of the two others.
pub(super) const HELLO: u8 = 22;
const CHANGE_OF_CIPHER: u8 = 20;
const ALERT: u8 = 21;
const DATA: u8 = 23;

#[derive(Debug)]
pub(crate) struct Session {
    tls: Connection,
    /// The record that is being received, of which the first `got` bytes have arrived.
    record: Vec<u8>,
    got: usize,
    /// No whole record has been received yet.
    is_first: bool,
    /// Encrypted bytes, of which the system has accepted the first `sent`.
    outgoing: Vec<u8>,
    sent: usize,
    /// Bytes that are encrypted in `outgoing` and were not reported to the caller as sent; it will offer them again.
    promised: usize,
}

impl Session {
    pub(crate) fn new(mut tls: Connection) -> Self {
        // `CHUNK` limits what is encrypted at once.
        tls.set_buffer_limit(None);
        Self { tls, record: Vec::new(), got: 0, is_first: true, outgoing: Vec::new(), sent: 0, promised: 0 }
    }

    /// Advances the handshake until it is done or would block.
    pub(crate) fn handshake(&mut self, socket: &TcpStream) -> io::Result<()> {
        loop {
            self.flush(socket)?;
            if self.tls.wants_write() {
                self.encrypt()?;
            } else if !self.tls.is_handshaking() {
                return Ok(());
            } else if !self.read_record(socket)? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Returns whether the handshake waits for space in the send buffer, not for the other side.
    pub(crate) fn has_outgoing(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Returns what has arrived of a record that could not be processed.
    pub(crate) fn unprocessed(&self) -> &[u8] {
        &self.record[..self.got]
    }

    /// Sends `head`, then `body`, as far as the send buffer has space now. Where it has none, this keeps what it has
    /// encrypted, and expects the same bytes again.
    pub(crate) fn send(&mut self, socket: &TcpStream, head: &[u8], body: &[u8]) -> io::Result<usize> {
        self.flush(socket)?;
        if self.promised == 0 {
            let head = &head[..head.len().min(CHUNK)];
            let body = &body[..body.len().min(CHUNK - head.len())];
            self.promised = self.tls.writer().write_vectored(&[IoSlice::new(head), IoSlice::new(body)])?;
            self.encrypt()?;
            self.flush(socket)?;
        }
        Ok(std::mem::take(&mut self.promised))
    }

    /// Sends `words` after what [`Session::send`] has encrypted already, if there is space.
    pub(crate) fn try_send(&mut self, socket: &TcpStream, words: &[u8]) -> io::Result<()> {
        self.flush(socket)?;
        self.tls.writer().write_all(words)?;
        self.encrypt()?;
        self.flush(socket)
    }

    /// Reads what has arrived into `into`, which is not empty; returns 0 at the end of the connection.
    pub(crate) fn recv(&mut self, socket: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return other,
            }
            if !self.read_record(socket)? {
                return Ok(0);
            }
        }
    }

    fn encrypt(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.outgoing)?;
        }
        Ok(())
    }

    fn flush(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        while self.sent < self.outgoing.len() {
            self.sent += again(|| socket.write(&self.outgoing[self.sent..]))?;
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(())
    }

    /// Reads one record and decrypts it; returns false at the end of the connection.
    fn read_record(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        loop {
            let wanted = self.record_len()?;
            if self.got == wanted {
                break;
            }
            if self.record.len() < wanted {
                self.record.resize(wanted, 0);
            }
            let part = &mut self.record[self.got..wanted];
            match again(|| socket.read(part))? {
                0 if self.got == 0 => return Ok(false),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                got => self.got += got,
            }
        }
        let mut rest = &self.record[..self.got];
        while !rest.is_empty() {
            self.tls.read_tls(&mut rest)?;
            if let Err(error) = self.tls.process_new_packets() {
                // Tells the other side why (an alert), if that is possible.
                let _ = self.tls.write_tls(&mut socket);
                return Err(io::Error::new(ErrorKind::InvalidData, error));
            }
        }
        (self.got, self.is_first) = (0, false);
        Ok(true)
    }

    /// Returns the length of the record that is being received, or of its header as long as that is incomplete.
    fn record_len(&self) -> io::Result<usize> {
        if self.got < HEADER {
            return Ok(HEADER);
        }
        let wanted = HEADER + usize::from(u16::from_be_bytes([self.record[3], self.record[4]]));
        // The authentication of later records does not cover these bytes, so only those are accepted that the other side
        // sends.
        let known = match self.record[0] {
            CHANGE_OF_CIPHER => wanted == HEADER + 1,
            ALERT => wanted == HEADER + 2,
            HELLO => self.is_first,
            DATA => !self.is_first,
            _ => false,
        };
        // A client's first record has version 3.1, all others have 3.3 (RFC 8446, 5.1).
        let is_opening = self.is_first && matches!(self.tls, Connection::Server(_));
        let known = known && self.record[1..3] == [3, if is_opening { 1 } else { 3 }];
        let limit = if self.tls.is_handshaking() { MAX_HANDSHAKE } else { MAX_RECORD };
        if known && wanted <= limit { Ok(wanted) } else { Err(ErrorKind::InvalidData.into()) }
    }
}

/// Makes a system call, again where a signal interrupted it.
fn again(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
