//! Checkpoints of a run: resuming from them, and writing them.

use std::path::PathBuf;
use std::time::Instant;

use comm::{Communicator, Operation, broadcast_object};
use training::build::Model;
use training::{Checkpoint, CheckpointConfig, Checkpoints, Contents};

use super::consistency::{CheckpointExtra, OBSERVER, check_resume};
use super::{BackgroundSaver, CheckpointPlan, Observer, ObserverState, Stop, StopCheck, Trainer};
use crate::agreement::all_agree;
use crate::{Error, Result};

/// Claims a folder of checkpoints for a run that all ranks of a group begin. Every rank must call it; a rank that joins a
/// running job calls [`Checkpoints::share_claim`].
///
/// # Errors
/// On every rank: another run that uses the folder; failures of communication.
pub fn claim_checkpoints(world: &dyn Communicator, checkpoints: &Checkpoints) -> Result<()> {
    let began = if world.rank() == 0 { checkpoints.claim().map_err(Error::from) } else { Ok(()) };
    all_agree(world, began)?;
    all_agree(world, checkpoints.share_claim().map_err(Error::from))
}

impl<M: Model> Trainer<'_, M> {
    /// Opens the folder of checkpoints, if they are kept, and returns it.
    pub(super) fn open_checkpoints(&mut self) -> Result<Option<&Checkpoints>> {
        if let Some(CheckpointPlan { dir, keep, .. }) = &self.config.checkpoints {
            self.checkpoints = Some(Checkpoints::open(CheckpointConfig { dir: dir.clone(), keep: *keep })?);
        }
        Ok(self.checkpoints.as_ref())
    }

    /// Creates the saver that writes checkpoints during training, if they are written so. Every rank must call it.
    pub(super) fn start_saver(&mut self) -> Result<()> {
        let in_background = self.config.checkpoints.as_ref().is_some_and(|plan| plan.in_background);
        if let Some(checkpoints) = self.checkpoints.clone().filter(|_| in_background) {
            let mut saver = BackgroundSaver::new(&*self.world, checkpoints)?;
            saver.before = self.abandoned.take();
            self.saver = Some(saver);
        }
        Ok(())
    }

    /// Resumes from the latest checkpoint in the folder, if there is one, and returns its step. Call on every rank.
    ///
    /// # Errors
    /// Those of [`resume`](Self::resume).
    pub fn resume_latest(&mut self) -> Result<Option<usize>> {
        let Some(checkpoints) = self.checkpoints.clone() else { return Ok(None) };
        let world = self.model.mesh().world().clone();
        // The first rank determines which checkpoint is the latest.
        let found = match world.rank() {
            0 => checkpoints.latest().map_err(Error::from),
            _ => Ok(None),
        };
        let step = all_agree(&*world, found)?.map(|contents| contents.step);
        let Some(step) = broadcast_object(&*world, &step, 0)? else { return Ok(None) };
        let same = |contents: Option<Contents>| contents.filter(|contents| contents.step == step);
        let own = checkpoints.latest().map_err(Error::from).and_then(|contents| {
            let dir = self.config.checkpoints.as_ref().map(|plan| plan.dir.clone()).unwrap_or_default();
            let problem = "rank 0 finds another checkpoint there: all ranks must see one folder";
            same(contents).ok_or_else(|| Error::file(&dir, problem))
        });
        let contents = all_agree(&*world, own)?;
        self.resume(&contents)?;
        Ok(Some(self.step))
    }

    /// Resumes from a checkpoint. Call on every rank, with the same one. The configuration may differ; [`check_resume`]
    /// returns the differences.
    ///
    /// # Errors
    /// A damaged checkpoint; one of another model, or of other data or another order of the data; failures of
    /// communication.
    pub fn resume(&mut self, contents: &Contents) -> Result<()> {
        let refuse = |problem: String| Error::file(&contents.folder, problem);
        all_agree(&**self.model.mesh().world(), check_resume(contents, self.data, &self.config))?;
        self.wait_for_copies();
        self.model.load(contents, Some(&mut self.optimizer))?;
        let state =
            serde_json::from_value(contents.sampler.clone()).map_err(|error| refuse(error.to_string()))?;
        self.order.resume(&state).map_err(|error| refuse(error.to_string()))?;
        (self.step, self.latest) = (contents.step as usize, None);
        (self.evaluated, self.checkpointed, self.written) = (self.step, self.step, self.step);
        if self.step > self.config.steps {
            let help = format!("the checkpoint is at step {} already: give more", self.step);
            return Err(Error::invalid("the steps", self.config.steps, help));
        }
        Ok(())
    }

    /// Waits for the checkpoint that is being written.
    pub(super) fn finish(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let Some(saver) = &mut self.saver else { return Ok(()) };
        let Some(folder) = saver.wait()? else { return Ok(()) };
        self.written = self.checkpointed;
        observer.saved(self.written, &folder)
    }

    /// After the first step, takes the memory for the copies that checkpoints are written from.
    pub(super) fn reserve_copies(&mut self) -> Result<()> {
        let Some(saver) = self.saver.as_mut().filter(|saver| !saver.is_reserved) else { return Ok(()) };
        saver.is_reserved = true;
        // Variables of other devices would be copied now.
        if self.model.named_vars().iter().all(|(_, var)| var.device().is_cpu()) {
            saver.reserve(&self.model.snapshot_later(Some(&self.optimizer))?);
        }
        Ok(())
    }

    /// Waits until the checkpoint's copies are made, because the variables must not change before.
    pub(super) fn wait_for_copies(&mut self) {
        let Some(saver) = &mut self.saver else { return };
        let stood_still = Instant::now();
        saver.wait_for_copy();
        self.summary.checkpoint_seconds += stood_still.elapsed().as_secs_f64();
    }

    /// Whether the model may replace that of an earlier checkpoint: not after a loss that is not finite.
    pub(super) fn may_save(&self) -> bool {
        self.latest.is_none_or(|latest| latest.loss.is_finite())
    }

    /// Writes a checkpoint of the current step, or begins to.
    pub(super) fn write_checkpoint(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let stood_still = Instant::now();
        tracing::info_span!("checkpoint").in_scope(|| self.save(observer))?;
        self.checkpointed = self.step;
        self.summary.checkpoints += 1;
        self.summary.checkpoint_seconds += stood_still.elapsed().as_secs_f64();
        Ok(())
    }

    /// Begins to ask whether the run is to stop early. Every rank must call it.
    pub(super) fn start_stop_check(&mut self) {
        let check = |flag| StopCheck::new(flag, self.world.clone(), self.config.fewest_ranks);
        self.stop = self.config.stop.clone().map(check);
    }

    /// Writes a checkpoint and ends the run with [`Error::Stopped`], if that is asked for.
    pub(super) fn stop_if_asked(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let Some(check) = &mut self.stop else { return Ok(()) };
        let Some(Stop { signal, leaves }) = check.decide()? else { return Ok(()) };
        if self.may_save() && self.checkpoints.is_some() && self.checkpointed < self.step {
            self.write_checkpoint(observer)?;
        }
        self.finish(observer)?;
        // A launcher may end all ranks when the first one ends: by then all files must be complete.
        self.world.run(Operation::Barrier)?;
        if leaves { Err(Error::Stopped { step: self.step, signal }) } else { Ok(()) }
    }

    fn save(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        let json = |value: serde_json::Result<serde_json::Value>| {
            value.map_err(|error| Error::invalid("a checkpoint", "state", error.to_string()))
        };
        observer.saving(self.step)?;
        let state = match self.model.mesh().world().rank() {
            0 => observer.state(),
            _ => Ok(ObserverState::default()),
        };
        let ObserverState { values, tensors } = all_agree(&**self.model.mesh().world(), state)?;
        let tensors = if tensors.is_empty() { None } else { Some((OBSERVER.to_string(), tensors)) };
        let checkpoint = Checkpoint {
            epoch: self.order.epoch(),
            step: self.step as u64,
            sampler: json(serde_json::to_value(self.order.state()))?,
            extra: json(serde_json::to_value(CheckpointExtra {
                data: self.data.fingerprint(),
                settings: self.config.settings.clone(),
                observer: values,
            }))?,
            tensors: tensors.into_iter().collect(),
        };
        let (step, folder): (usize, Option<PathBuf>) = match &mut self.saver {
            None => (self.step, Some(self.model.save(checkpoints, Some(&self.optimizer), &checkpoint)?)),
            Some(saver) => {
                // Before another copy is made, so that there is only one in memory.
                let folder = saver.wait()?;
                let snapshot = self.model.snapshot_later(Some(&self.optimizer));
                let snapshot = all_agree(&**self.model.mesh().world(), snapshot)?;
                // The optimizer's next step waits until the copy is made; forward and backward do not.
                saver.begin_later(snapshot, checkpoint)?;
                (self.checkpointed, folder)
            }
        };
        let Some(folder) = folder else { return Ok(()) };
        self.written = step;
        observer.saved(step, &folder)
    }
}
