//! Messages on a control connection: one JSON object a line.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use crate::tcp::links::timespec;
use crate::tcp::stream::Stream;
use crate::verdict::{Activity, Cause, Question};

/// The longest line that is read; real ones have less than 2 KiB.
const MAX_LINE: usize = 64 * 1024;
/// Read at once: as much as one encrypted record can hold, so that nothing is left of it where nobody waits for it.
const CHUNK: usize = 16 * 1024;
/// How long a message may wait for room; rank 0 must not hang on a rank that is stopped.
const WRITE_PATIENCE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Message {
    /// To rank 0: who is to blame?
    Ask { id: u64, question: Question },
    /// From rank 0: what are you doing?
    Probe { inquiry: u64 },
    /// The answer to a probe.
    Doing { inquiry: u64, activity: Activity },
    /// From rank 0: the answer to a question, where the group goes on.
    Answer { id: u64, cause: Option<Cause> },
    /// From rank 0: the group has failed.
    Verdict(Cause),
    /// The sender closes its group and needs nothing more; it has taken part in so many collectives. `because` where another
    /// group of the job has failed.
    Goodbye {
        progress: u64,
        #[serde(default)]
        because: Option<Cause>,
    },
}

/// One control connection.
pub(super) struct Wire {
    stream: Arc<Stream>,
    inbox: Inbox,
}

/// The other side is gone, or does not keep to the protocol.
#[derive(Debug, PartialEq)]
pub(super) struct Ended;

/// Bytes that have come and are no whole line yet.
#[derive(Default)]
pub(super) struct Inbox(Vec<u8>);

impl Inbox {
    /// The messages that are whole with these bytes; none after one that no rank sends.
    pub(super) fn take(&mut self, bytes: &[u8], messages: &mut Vec<Message>) -> Result<(), Ended> {
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
        Self { stream, inbox: Inbox::default() }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Reads what has come, or a part of it.
    pub(super) fn read(&mut self) -> (Vec<Message>, Result<(), Ended>) {
        let (mut chunk, mut messages, mut read) = ([0; CHUNK], Vec::new(), 0);
        let outcome = loop {
            match self.stream.recv(&mut chunk) {
                Ok(0) => break Err(Ended),
                Ok(got) => {
                    read += got;
                    let outcome = self.inbox.take(&chunk[..got], &mut messages);
                    // The others shall be heard, too.
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

    /// Writes a message; where the other side takes nothing for a while, it is lost, and reading will show why.
    pub(super) fn write(&mut self, message: &Message) {
        let Ok(mut line) = serde_json::to_vec(message) else { return };
        line.push(b'\n');
        let mut rest = &line[..];
        while !rest.is_empty() {
            match self.stream.send(rest, &[]) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut polled = [PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::OUT)];
                    if !matches!(poll(&mut polled, Some(&timespec(WRITE_PATIENCE))), Ok(ready) if ready > 0) {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }
}
