//! Checkpoints that are written while training goes on.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{Builder, JoinHandle};

use comm::Communicator;
use training::{Checkpoint, Checkpoints};

use crate::checkpoint::{Snapshot, SnapshotLater, agreed};
use crate::{Error, Result};

/// Writes checkpoints beside the training, at most one at a time, over a group of its own.
pub struct Saver {
    comm: Arc<dyn Communicator>,
    checkpoints: Checkpoints,
    at_work: Option<JoinHandle<Result<PathBuf>>>,
    /// Hears when parameters and what the optimizer remembers are copied.
    copying: Option<Receiver<()>>,
}

impl Saver {
    /// To be called on every rank of `world`.
    ///
    /// # Cost
    /// A group of all ranks.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn new(world: &dyn Communicator, checkpoints: Checkpoints) -> Result<Self> {
        let comm = world.split(Some(0), world.rank())?;
        let comm = comm.ok_or_else(|| {
            Error::invalid("the group of checkpoints", "none", "this is a mistake in girandole")
        })?;
        Ok(Self { comm, checkpoints, at_work: None, copying: None })
    }

    /// Waits for the checkpoint before, and begins to write another. Gives the folder of the one before, where there was one.
    ///
    /// # Errors
    /// What the one before failed with, on every rank.
    pub fn begin(&mut self, snapshot: Snapshot, checkpoint: Checkpoint) -> Result<Option<PathBuf>> {
        self.begin_with(move || Ok(snapshot), checkpoint)
    }

    /// The same of what is still to be copied: [`copied`](Self::copied) must be called before parameters change.
    ///
    /// # Errors
    /// Those of [`begin`](Self::begin).
    pub fn begin_later(
        &mut self,
        snapshot: SnapshotLater,
        checkpoint: Checkpoint,
    ) -> Result<Option<PathBuf>> {
        self.begin_with(move || snapshot.copy(), checkpoint)
    }

    fn begin_with(
        &mut self,
        copy: impl FnOnce() -> Result<Snapshot> + Send + 'static,
        checkpoint: Checkpoint,
    ) -> Result<Option<PathBuf>> {
        let before = self.wait()?;
        let (comm, checkpoints) = (self.comm.clone(), self.checkpoints.clone());
        let (tell, told) = channel();
        let write = move || {
            let snapshot = copy();
            // It is told as well by a panic, which drops this end.
            drop(tell);
            agreed(&*comm, snapshot)?.write(&*comm, &checkpoints, &checkpoint)
        };
        let thread = Builder::new().name("checkpoint".into()).spawn(write);
        self.at_work = Some(thread.map_err(|error| Error::file(std::path::Path::new("a thread"), error))?);
        self.copying = Some(told);
        Ok(before)
    }

    /// Waits until parameters, and what the optimizer remembers, may change again.
    pub fn copied(&mut self) {
        if let Some(copying) = self.copying.take() {
            // Nothing is ever sent: it ends when the other end is dropped.
            let _ = copying.recv();
        }
    }

    /// Gives up what cannot be finished; true where it is written already.
    pub(super) fn leave(mut self) -> bool {
        match self.at_work.take_if(|thread| !thread.is_finished()) {
            // It ends by itself, when it hears no more of the ranks that are lost.
            Some(_) => false,
            None => matches!(self.wait(), Ok(Some(_))),
        }
    }

    /// Waits for the checkpoint that is being written, if there is one, and gives its folder.
    ///
    /// # Errors
    /// What it failed with, on every rank: the latest checkpoint is the one before.
    pub fn wait(&mut self) -> Result<Option<PathBuf>> {
        let Some(thread) = self.at_work.take() else { return Ok(None) };
        match thread.join() {
            Ok(written) => written.map(Some),
            Err(_) => Err(Error::file(std::path::Path::new("the checkpoint"), "its thread panicked")),
        }
    }
}

impl Drop for Saver {
    /// Waits, so that the process does not end in the middle; what fails then is the next start's to see.
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::warn!("the last checkpoint was not written: {error}");
        }
    }
}

impl std::fmt::Debug for Saver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Saver").field("writes", &self.at_work.is_some()).finish_non_exhaustive()
    }
}
