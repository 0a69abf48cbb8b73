//! One encrypted connection. Nothing of it ever blocks, and nothing is kept back: bytes count as sent when the system has
//! them, and no more is read than the record that is asked for, so that a socket with nothing to read means that nothing has
//! come.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;

use rustls::Connection;

/// What stands before a record.
const HEADER: usize = 5;
/// The longest record (RFC 8446, 5.2).
const MAX_RECORD: usize = HEADER + 16384 + 256;
/// The longest one in a handshake, which has a few hundred bytes: room is made for it before the other side has proved anything.
const MAX_HANDSHAKE: usize = 4096;
/// Encrypted at once: enough for few calls of the system, little enough to stay in the processor's cache.
const CHUNK: usize = 64 * 1024;
/// The first byte of a client's first message, and of the answer; what comes later is data or one of the two others.
pub(super) const HELLO: u8 = 22;
const CHANGE_OF_CIPHER: u8 = 20;
const ALERT: u8 = 21;
const DATA: u8 = 23;

#[derive(Debug)]
pub(crate) struct Session {
    tls: Connection,
    /// The record that is coming, of which the first `got` bytes are there.
    record: Vec<u8>,
    got: usize,
    /// No record has come yet: it is the first.
    is_first: bool,
    /// Encrypted, of which the first `sent` bytes are with the system.
    outgoing: Vec<u8>,
    sent: usize,
    /// Bytes that `outgoing` holds and that the caller was not told are sent; it will offer them again.
    promised: usize,
}

impl Session {
    pub(crate) fn new(mut tls: Connection) -> Self {
        // What is encrypted at once is limited here.
        tls.set_buffer_limit(None);
        Self { tls, record: Vec::new(), got: 0, is_first: true, outgoing: Vec::new(), sent: 0, promised: 0 }
    }

    /// Goes on with the handshake until it is done, or has to wait.
    pub(crate) fn shake(&mut self, socket: &TcpStream) -> io::Result<()> {
        loop {
            self.flush(socket)?;
            if self.tls.wants_write() {
                self.encrypt()?;
            } else if !self.tls.is_handshaking() {
                return Ok(());
            } else if !self.pull(socket)? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// True where the handshake waits for room, and not for the other side.
    pub(crate) fn has_outgoing(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// The first bytes of what the other side has sent and this one could not read.
    pub(crate) fn strange(&self) -> &[u8] {
        &self.record[..self.got]
    }

    /// Sends `head`, then `body`, as far as there is room now. Where there is none it keeps what it has encrypted, and expects
    /// the same bytes again.
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

    /// Sends some words beside what [`Session::send`] is about to, if there is room.
    pub(crate) fn say(&mut self, socket: &TcpStream, words: &[u8]) -> io::Result<()> {
        self.flush(socket)?;
        self.tls.writer().write_all(words)?;
        self.encrypt()?;
        self.flush(socket)
    }

    /// Fills `into`, which is not empty, as far as bytes have come; 0 at the end.
    pub(crate) fn recv(&mut self, socket: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return other,
            }
            if !self.pull(socket)? {
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

    /// Reads one record and decrypts it; false at the end of the connection.
    fn pull(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        loop {
            let wanted = self.wanted()?;
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
                // The other side is told why, if it can be.
                let _ = self.tls.write_tls(&mut socket);
                return Err(io::Error::new(ErrorKind::InvalidData, error));
            }
        }
        (self.got, self.is_first) = (0, false);
        Ok(true)
    }

    /// Bytes of the record that is coming, as far as is known.
    fn wanted(&self) -> io::Result<usize> {
        if self.got < HEADER {
            return Ok(HEADER);
        }
        let wanted = HEADER + usize::from(u16::from_be_bytes([self.record[3], self.record[4]]));
        // The proofs of later records do not cover these bytes, so that only those are taken that the other side sends.
        let known = match self.record[0] {
            CHANGE_OF_CIPHER => wanted == HEADER + 1,
            ALERT => wanted == HEADER + 2,
            HELLO => self.is_first,
            DATA => !self.is_first,
            _ => false,
        };
        // A client's first message names the first version of the protocol, all others the last but one (RFC 8446, 5.1).
        let is_opening = self.is_first && matches!(self.tls, Connection::Server(_));
        let known = known && self.record[1..3] == [3, if is_opening { 1 } else { 3 }];
        let limit = if self.tls.is_handshaking() { MAX_HANDSHAKE } else { MAX_RECORD };
        if known && wanted <= limit { Ok(wanted) } else { Err(ErrorKind::InvalidData.into()) }
    }
}

/// A call of the system, once more where a signal came between.
fn again(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
