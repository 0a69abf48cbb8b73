//! Background checkpoint writer: files are written while training continues.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{Builder, JoinHandle};

use comm::Communicator;
use training::{Checkpoint, Checkpoints};

use crate::checkpoint::{DeferredSnapshot, Snapshot, all_or_error};
use crate::{Error, Result};

/// Writes checkpoints during training, at most one at a time, over its own group.
pub struct BackgroundSaver {
    comm: Arc<dyn Communicator>,
    checkpoints: Checkpoints,
    at_work: Option<JoinHandle<Result<PathBuf>>>,
    /// Disconnects when parameters and optimizer state are copied.
    copying: Option<Receiver<()>>,
}

impl BackgroundSaver {
    /// Creates a saver. Call on every rank of `world`.
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

    /// Waits for the previous checkpoint, and starts to write another. Returns the folder of the previous one, if there
    /// was one.
    ///
    /// # Errors
    /// Errors of the previous checkpoint, on every rank.
    pub fn begin(&mut self, snapshot: Snapshot, checkpoint: Checkpoint) -> Result<Option<PathBuf>> {
        self.begin_with(move || Ok(snapshot), checkpoint)
    }

    /// Like [`begin`](Self::begin), with a copy that is made later: call [`wait_for_copy`](Self::wait_for_copy) before parameters
    /// change.
    ///
    /// # Errors
    /// Those of [`begin`](Self::begin).
    pub fn begin_later(
        &mut self,
        snapshot: DeferredSnapshot,
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
            // A panic also drops this end, so `wait_for_copy` always returns.
            drop(tell);
            all_or_error(&*comm, snapshot)?.write(&*comm, &checkpoints, &checkpoint)
        };
        let thread = Builder::new().name("checkpoint".into()).spawn(write);
        self.at_work = Some(thread.map_err(|error| Error::file(std::path::Path::new("a thread"), error))?);
        self.copying = Some(told);
        Ok(before)
    }

    /// Waits until parameters and optimizer state may change again.
    pub fn wait_for_copy(&mut self) {
        if let Some(copying) = self.copying.take() {
            // Nothing is ever sent: `recv` returns when the other end is dropped.
            let _ = copying.recv();
        }
    }

    /// Abandons a checkpoint that cannot be completed. Returns true if it is already written.
    pub(super) fn abandon(mut self) -> bool {
        match self.at_work.take_if(|thread| !thread.is_finished()) {
            // The thread ends by itself when its collectives fail because of the lost ranks.
            Some(_) => false,
            None => matches!(self.wait(), Ok(Some(_))),
        }
    }

    /// Waits for the checkpoint that is being written, if there is one, and returns its folder.
    ///
    /// # Errors
    /// Its error, on every rank: the latest checkpoint is then the one before.
    pub fn wait(&mut self) -> Result<Option<PathBuf>> {
        let Some(thread) = self.at_work.take() else { return Ok(None) };
        match thread.join() {
            Ok(written) => written.map(Some),
            Err(_) => Err(Error::file(std::path::Path::new("the checkpoint"), "its thread panicked")),
        }
    }
}

impl Drop for BackgroundSaver {
    /// Waits, so that the process does not end in the middle. An error is only logged; the next start resumes from an
    /// earlier checkpoint.
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::warn!("the last checkpoint was not written: {error}");
        }
    }
}

impl std::fmt::Debug for BackgroundSaver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackgroundSaver").field("writes", &self.at_work.is_some()).finish_non_exhaustive()
    }
}
