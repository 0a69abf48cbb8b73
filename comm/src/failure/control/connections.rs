//! The control connections of rank 0, of which only those are looked at on which something has come.

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};

use super::wire::{ControlMessage, Ended, Wire};
use crate::connection::connect_error::ConnectError;
use crate::connection::stream::Stream;
use crate::platform::ReadySet;
use crate::{Error, Result};

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

    pub(super) fn is_open(&self, rank: usize) -> bool {
        self.wires.get(rank).is_some_and(Option::is_some)
    }

    pub(super) fn close(&mut self, rank: usize) {
        self.waits.remove(rank);
        self.wires[rank] = None;
    }

    /// Reads what a rank has sent; None where its connection is closed already.
    pub(super) fn read(
        &mut self,
        rank: usize,
    ) -> Option<(Vec<ControlMessage>, std::result::Result<(), Ended>)> {
        self.with(rank, Wire::read)
    }

    /// Sends a message to a rank, if its connection is open.
    pub(super) fn write(&mut self, rank: usize, message: &ControlMessage) {
        self.with(rank, |wire| wire.write(message));
    }

    pub(super) fn write_all(&mut self, message: &ControlMessage) {
        (0..self.wires.len()).for_each(|rank| self.write(rank, message));
    }

    fn with<T>(&mut self, rank: usize, act: impl FnOnce(&mut Wire) -> T) -> Option<T> {
        let wire = self.wires[rank].as_mut()?;
        let result = act(wire);
        // Where it fails, what is queued goes with the next message.
        let _ = self.waits.change(rank, wire.events());
        Some(result)
    }
}
