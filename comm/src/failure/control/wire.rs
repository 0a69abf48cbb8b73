//! Messages on a control connection: one JSON object a line.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use crate::base::cause::Cause;
use crate::base::timespec::timespec;
use crate::connection::stream::Stream;
use crate::failure::diagnosis::{Activity, Question};

/// The longest line that is accepted.
const MAX_LINE: usize = 64 * 1024;
/// Bytes read at once: as much as one encrypted record can hold, so that no decrypted bytes stay behind where `poll`
/// cannot see them.
const CHUNK: usize = 16 * 1024;
/// How long writing a message may wait for room in the socket buffer; rank 0 must not block on a rank that is stopped.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);
/// The most bytes queued beyond the socket buffer. A rank that reads nothing needs no more messages.
const MAX_WAITING: usize = MAX_LINE;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum ControlMessage {
    /// To rank 0: a question about a cause.
    Ask { id: u64, question: Question },
    /// From rank 0: asks what the rank is doing.
    Probe { inquiry: u64 },
    /// The answer to a probe.
    Doing { inquiry: u64, activity: Activity },
    /// From rank 0: the answer to a question for which the group does not fail.
    Answer { id: u64, cause: Option<Cause> },
    /// From rank 0: the group has failed with this cause.
    Verdict(Cause),
    /// The sender closes its group and needs nothing more. `progress`: the number of collectives it has taken part in.
    /// `because`: the reason that its program has announced, or the cause for which another group of the job has failed.
    Goodbye {
        progress: u64,
        #[serde(default)]
        because: Option<Cause>,
    },
}

/// One control connection.
pub(super) struct Wire {
    stream: Arc<Stream>,
    inbox: LineBuffer,
    /// Messages that did not fit into the socket buffer. The first may have been sent in part, so nothing else may be
    /// sent before its rest.
    outbox: Vec<u8>,
}

/// The other side is gone, or has violated the protocol.
#[derive(Debug, PartialEq)]
pub(super) struct Ended;

/// Received bytes that are no whole line yet.
#[derive(Default)]
pub(super) struct LineBuffer(Vec<u8>);

impl LineBuffer {
    /// Appends the messages that are complete with these bytes to `messages`. Stops with an error at the first invalid
    /// one.
    pub(super) fn take(&mut self, bytes: &[u8], messages: &mut Vec<ControlMessage>) -> Result<(), Ended> {
        self.0.extend_from_slice(bytes);
        let mut start = 0;
        while let Some(len) = self.0[start..].iter().position(|byte| *byte == b'\n') {
            let line = Some(&self.0[start..start + len]).filter(|line| line.len() <= MAX_LINE);
            let message = line.and_then(|line| serde_json::from_slice(line).ok());
            messages.push(message.ok_or(Ended)?);
            start += len + 1;
        }
        self.0.drain(..start);
        if self.0.len() > MAX_LINE { Err(Ended) } else { Ok(()) }
    }
}

impl Wire {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, inbox: LineBuffer::default(), outbox: Vec::new() }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn shared_stream(&self) -> Arc<Stream> {
        self.stream.clone()
    }

    /// The events to poll for before the next [`Wire::read`].
    pub(super) fn events(&self) -> PollFlags {
        if self.outbox.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT }
    }

    /// Reads what has arrived, up to about [`MAX_LINE`] bytes, and sends queued messages.
    pub(super) fn read(&mut self) -> (Vec<ControlMessage>, Result<(), Ended>) {
        self.flush(Duration::ZERO);
        let (mut chunk, mut messages, mut read) = ([0; CHUNK], Vec::new(), 0);
        let outcome = loop {
            match self.stream.recv(&mut chunk) {
                Ok(0) => break Err(Ended),
                Ok(got) => {
                    read += got;
                    let outcome = self.inbox.take(&chunk[..got], &mut messages);
                    // The other connections must be served, too.
                    if outcome.is_err() || read > MAX_LINE {
                        break outcome;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break Err(Ended),
            }
        };
        (messages, outcome)
    }

    /// Writes a message. If the other side does not read for a while, the rest of it is queued for the next call. If
    /// too much is queued already, the whole message is dropped; a later read detects what is wrong with the
    /// connection.
    pub(super) fn write(&mut self, message: &ControlMessage) {
        let Ok(line) = serde_json::to_vec(message) else { return };
        if self.outbox.len() + line.len() < MAX_WAITING {
            self.outbox.extend(line);
            self.outbox.push(b'\n');
        }
        self.flush(WRITE_TIMEOUT);
    }

    /// Sends queued bytes, waiting up to `time_limit` each time the socket buffer is full.
    fn flush(&mut self, time_limit: Duration) {
        let mut sent = 0;
        while sent < self.outbox.len() {
            match self.stream.send(&self.outbox[sent..], &[]) {
                Ok(written) => sent += written,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut polled = [PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::OUT)];
                    if !matches!(poll(&mut polled, Some(&timespec(time_limit))), Ok(ready) if ready > 0) {
                        break;
                    }
                }
                // The other side is gone.
                Err(_) => sent = self.outbox.len(),
            }
        }
        self.outbox.drain(..sent);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::Secret;
    use crate::base::cause::Cause;
    use crate::connection::tls::Identity;
    use crate::connection::tls::Session;

    fn pair() -> [Arc<Stream>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let here = listener.accept().unwrap().0;
        [here, there].map(|socket| {
            socket.set_nonblocking(true).unwrap();
            Arc::new(Stream::from(socket))
        })
    }

    /// The same as `pair`, encrypted.
    fn encrypted() -> [Arc<Stream>; 2] {
        let streams = pair();
        let identity = Identity::new(&Secret::random().unwrap(), "job").unwrap();
        let mut sessions = [identity.server().unwrap(), identity.client().unwrap()].map(Session::new);
        let mut done = [false; 2];
        while done != [true; 2] {
            for ((stream, session), done) in streams.iter().zip(&mut sessions).zip(&mut done) {
                *done = session.handshake(stream.socket()).is_ok();
            }
        }
        streams.iter().zip(sessions).for_each(|(stream, session)| stream.secure(session));
        streams
    }

    /// A rank that did not read while messages were written reads whole messages later, in order.
    #[test]
    fn a_message_is_never_cut_off() {
        for streams in [pair(), encrypted()] {
            let [mut writer, mut reader] = streams.map(Wire::new);
            let message = |number: usize| {
                let detail = "x".repeat(1 + number * 997 % 5000);
                ControlMessage::Verdict(Cause::Stalled { rank: number, detail })
            };
            let mut written = 0;
            while writer.outbox.is_empty() {
                writer.write(&message(written));
                written += 1;
            }
            assert!(writer.events().contains(PollFlags::OUT));
            // This one follows a message that was sent in part, and is shorter.
            writer.write(&ControlMessage::Probe { inquiry: 7 });
            let mut received = Vec::new();
            while received.len() <= written {
                let (messages, outcome) = reader.read();
                assert_eq!(outcome, Ok(()));
                received.extend(messages);
                assert_eq!(writer.read(), (Vec::new(), Ok(())));
            }
            let expected = (0..written).map(message).chain([ControlMessage::Probe { inquiry: 7 }]);
            assert!(received.into_iter().eq(expected));
        }
    }
}
