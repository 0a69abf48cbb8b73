//! The control connections of rank 0, of which only those are looked at on which something has come.
//!
//! What rank 0 and the others say on them is decided without sockets, by [`Coordinator`](super::coordinator::Coordinator) and
//! [`Member`](super::member::Member), over anything that is [`ControlLinks`].

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};

use super::wire::{ControlMessage, Ended, Wire};
use crate::connection::connect_error::ConnectError;
use crate::connection::stream::Stream;
use crate::platform::ReadySet;
use crate::{Error, Result};

/// A connection to another rank, on which messages are sent without waiting.
pub(super) trait ControlLink {
    fn write(&mut self, message: &ControlMessage);
}

impl ControlLink for Wire {
    fn write(&mut self, message: &ControlMessage) {
        Wire::write(self, message);
    }
}

/// Connections to other ranks, on which messages are sent without waiting.
pub(super) trait ControlLinks: Send {
    fn is_open(&self, rank: usize) -> bool;

    fn close(&mut self, rank: usize);

    /// Sends a message to a rank, if its connection is open.
    fn write(&mut self, rank: usize, message: &ControlMessage);

    /// Sends a message to all ranks.
    fn write_all(&mut self, message: &ControlMessage);
}

/// One connection to each other rank, as long as that is there.
pub(super) struct Connections {
    /// By rank.
    wires: Vec<Option<Wire>>,
    waits: ReadySet<Arc<Stream>>,
}

impl Connections {
    /// Takes the connections, by rank.
    ///
    /// # Errors
    /// If the system lacks the resources.
    pub(super) fn new(wires: Vec<Option<Wire>>) -> Result<Self> {
        let failed = |reason| Error::system("watching the ranks", ConnectError::from(reason));
        let mut waits = ReadySet::new().map_err(failed)?;
        for (rank, wire) in wires.iter().enumerate() {
            if let Some(wire) = wire {
                waits.insert(rank, wire.shared_stream(), PollFlags::IN).map_err(failed)?;
            }
        }
        Ok(Self { wires, waits })
    }

    /// What to poll for.
    pub(super) fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        fds.extend(self.waits.fds().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
    }

    /// Returns the ranks whose connections are ready.
    pub(super) fn ready(&self) -> Vec<usize> {
        // Where the system cannot say, any of them may be.
        self.waits.ready().unwrap_or_else(|_| (0..self.wires.len()).collect())
    }

    /// Reads what a rank has sent; None where its connection is closed already.
    pub(super) fn read(
        &mut self,
        rank: usize,
    ) -> Option<(Vec<ControlMessage>, std::result::Result<(), Ended>)> {
        self.with(rank, Wire::read)
    }

    fn with<T>(&mut self, rank: usize, act: impl FnOnce(&mut Wire) -> T) -> Option<T> {
        let wire = self.wires[rank].as_mut()?;
        let result = act(wire);
        // Where it fails, what is queued goes with the next message.
        let _ = self.waits.change(rank, wire.events());
        Some(result)
    }
}

impl ControlLinks for Connections {
    fn is_open(&self, rank: usize) -> bool {
        self.wires.get(rank).is_some_and(Option::is_some)
    }

    fn close(&mut self, rank: usize) {
        self.waits.remove(rank);
        self.wires[rank] = None;
    }

    fn write(&mut self, rank: usize, message: &ControlMessage) {
        self.with(rank, |wire| wire.write(message));
    }

    fn write_all(&mut self, message: &ControlMessage) {
        (0..self.wires.len()).for_each(|rank| self.write(rank, message));
    }
}
