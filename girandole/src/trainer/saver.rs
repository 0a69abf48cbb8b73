//! Background checkpoint writer: files are written while training continues.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use comm::Communicator;
use training::{Checkpoint, Checkpoints};

use crate::agreement::all_agree;
use crate::{Error, Result};
use strategy::checkpoint::{DeferredSnapshot, SpareTensors, reserve};
use training::internal::lock;

/// Writes checkpoints during training, at most one at a time, over its own group.
pub(super) struct BackgroundSaver {
    comm: Arc<dyn Communicator>,
    checkpoints: Checkpoints,
    at_work: Option<Writing>,
    /// Disconnects when parameters and optimizer state are copied.
    copying: Option<Receiver<()>>,
    /// Memory for the next copy, which is kept from one to the next; locked while it is being taken.
    spares: Arc<Mutex<SpareTensors>>,
    is_reserved: bool,
    /// A checkpoint of an earlier saver that may still be written: nothing else may be written before it ends.
    pub(super) before: Option<Writing>,
}

/// A thread that writes a checkpoint, and returns its folder.
pub(super) type Writing = JoinHandle<Result<PathBuf>>;

impl BackgroundSaver {
    /// Creates a saver. Call on every rank of `world`.
    ///
    /// # Cost
    /// A group of all ranks.
    ///
    /// # Errors
    /// Failures of communication.
    pub(super) fn new(world: &dyn Communicator, checkpoints: Checkpoints) -> Result<Self> {
        let comm = world.split(Some(0), world.rank())?;
        let comm = comm.ok_or_else(|| {
            Error::invalid("the group of checkpoints", "none", "this is a mistake in girandole")
        })?;
        let (spares, is_reserved) = (Arc::default(), false);
        Ok(Self { comm, checkpoints, at_work: None, copying: None, spares, is_reserved, before: None })
    }

    /// Takes the memory for copies from the operating system in the background, so that the first checkpoint takes no longer
    /// than the others. Without this call, the first one takes the memory itself.
    pub(super) fn reserve(&self, snapshot: &DeferredSnapshot) {
        let (sizes, spares) = (snapshot.sizes(), self.spares.clone());
        let (taking, is_taking) = channel::<()>();
        let take = move || {
            // Otherwise a copy has the memory already, or is taking it.
            let Ok(mut spares) = spares.try_lock() else { return };
            drop(taking);
            // What cannot be had now is taken by the first checkpoint, which reports the error.
            *spares = reserve(sizes).unwrap_or_default();
        };
        if Builder::new().name("checkpoint memory".into()).spawn(take).is_ok() {
            // A checkpoint that begins after this call finds the memory.
            let _ = is_taking.recv();
        }
    }

    /// Whether the memory for copies is to be taken now, by the first call only.
    pub(super) fn begins_to_reserve(&mut self) -> bool {
        !std::mem::replace(&mut self.is_reserved, true)
    }

    /// Waits for the previous checkpoint, and starts to write another, with a copy that is made later: call
    /// [`wait_for_copy`](Self::wait_for_copy) before parameters change. Returns the folder of the previous one, if there was one.
    ///
    /// # Errors
    /// Errors of the previous checkpoint, on every rank.
    pub(super) fn begin(
        &mut self,
        snapshot: DeferredSnapshot,
        checkpoint: Checkpoint,
    ) -> Result<Option<PathBuf>> {
        let before = self.wait()?;
        let (comm, checkpoints, abandoned) =
            (self.comm.clone(), self.checkpoints.clone(), self.before.take());
        let (copied, copying) = channel::<()>();
        let spares = self.spares.clone();
        let write = move || {
            let _span = tracing::info_span!("write checkpoint").entered();
            let mut spares = lock(&spares);
            let snapshot = snapshot.copy_over(&mut spares);
            // A panic also drops this end, so `wait_for_copy` always returns.
            drop(copied);
            // Its error is that of a checkpoint that does not count.
            drop(abandoned.map(JoinHandle::join));
            let snapshot = all_agree(&*comm, snapshot.map_err(Error::from))?;
            let written = snapshot.write(&[&*comm], &checkpoints, &checkpoint);
            *spares = snapshot.into_spares();
            Ok(written?)
        };
        let thread = Builder::new().name("checkpoint".into()).spawn(write);
        self.at_work = Some(thread.map_err(|error| Error::file(std::path::Path::new("a thread"), error))?);
        self.copying = Some(copying);
        Ok(before)
    }

    /// Waits until parameters and optimizer state may change again.
    pub(super) fn wait_for_copy(&mut self) {
        if let Some(copying) = self.copying.take() {
            // Nothing is ever sent: `recv` returns when the other end is dropped.
            let _ = copying.recv();
        }
    }

    /// Abandons a checkpoint that cannot be completed. Returns the folder of one that is already written, or a thread that is
    /// still at work: it ends by itself when its collectives fail because of the lost ranks, or completes the checkpoint if
    /// it has none left.
    pub(super) fn abandon(mut self) -> (Option<PathBuf>, Option<Writing>) {
        match self.at_work.take_if(|thread| !thread.is_finished()) {
            Some(thread) => (None, Some(thread)),
            None => (self.wait().ok().flatten(), self.before.take()),
        }
    }

    /// Waits for the checkpoint that is being written, if there is one, and returns its folder.
    ///
    /// # Errors
    /// Its error, on every rank: the latest checkpoint is then the one before.
    pub(super) fn wait(&mut self) -> Result<Option<PathBuf>> {
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
