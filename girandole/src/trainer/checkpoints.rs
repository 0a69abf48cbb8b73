//! Checkpoints of a run: resuming from them, and writing them.

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Instant;

use comm::{Communicator, broadcast_object};
use strategy::DistributedModel;
use training::build::Model;
use training::{CheckpointConfig, Checkpoints, Contents};

use super::consistency::{CheckpointExtra, check_resume};
use super::origin::Origin;
use super::saver::{BackgroundSaver, Writing};
use super::stop::signal_of;
use super::{CheckpointPlan, Done, Observer, ObserverState, Stop, StopCheck, Trainer};
use crate::agreement::all_agree;
use crate::far::checkpoints::{self as far, FarRun};
use crate::parallel::FarGroups;
use crate::{Error, Result};

/// The checkpoints of a run.
#[derive(Default)]
pub(super) struct RunCheckpoints {
    /// Where they are, if they are kept.
    pub(super) folder: Option<Checkpoints>,
    writer: Writer,
    /// Step of the last one that was begun, and of the last one that is completely written.
    pub(super) begun: usize,
    pub(super) written: usize,
    pub(super) origin: Origin,
    /// In an elastic run with `far`: step of the last one that all groups have written. It and later ones are not removed, since the later
    /// ones may be abandoned by some groups.
    pub(super) of_all_groups: usize,
    /// Whether the one that was begun last becomes such a one when the groups average next: no group was lost since.
    is_of_all: bool,
}

/// Who writes checkpoints.
#[derive(Default)]
enum Writer {
    /// The trainer, between two steps.
    #[default]
    BetweenSteps,
    /// A thread, while training continues.
    InBackground(BackgroundSaver),
    /// No one: the group of the thread before has lost a rank, and there is no other yet.
    Abandoned {
        /// The thread, if it still writes; another one waits for it.
        at_work: Option<Writing>,
        /// A checkpoint that was complete by then, and of which the observer has not heard.
        complete: Option<Complete>,
    },
}

/// A checkpoint that is completely written.
pub(super) struct Complete {
    pub(super) step: usize,
    pub(super) folder: PathBuf,
}

impl RunCheckpoints {
    /// Abandons a checkpoint that is being written: a part of it was lost with a rank, so the one before is the latest.
    pub(super) fn abandon(&mut self) {
        self.is_of_all = false;
        let mut saver = match std::mem::take(&mut self.writer) {
            Writer::InBackground(saver) => saver,
            other => {
                self.writer = other;
                return;
            }
        };
        saver.wait_for_copy();
        let (folder, at_work) = saver.abandon();
        if folder.is_some() {
            self.written = self.begun;
        }
        let complete = folder.map(|folder| Complete { step: self.written, folder });
        self.writer = Writer::Abandoned { at_work, complete };
    }

    /// In an elastic run with `far`, after an average, before which each group has waited for its checkpoint.
    pub(super) fn groups_have_averaged(&mut self) {
        if std::mem::take(&mut self.is_of_all) {
            self.set_of_all_groups(self.written);
        }
    }

    /// All groups have written the checkpoint of a step.
    pub(super) fn set_of_all_groups(&mut self, step: usize) {
        self.of_all_groups = step;
        if let Some(folder) = &self.folder {
            folder.keep_from(step as u64);
        }
    }

    /// Waits for an abandoned checkpoint, which may become complete, and is the latest one then.
    pub(super) fn wait_for_abandoned(&mut self) {
        if let Writer::Abandoned { at_work, .. } = &mut self.writer {
            drop(at_work.take().map(JoinHandle::join));
        }
    }
}

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
            let dir = self.model.far().map_or(dir.clone(), |far| far::folder(dir, far.number()));
            let config = CheckpointConfig { dir, keep: *keep };
            self.checkpoints.folder = Some(Checkpoints::open(config)?);
            if self.has_elastic_groups() {
                self.checkpoints.set_of_all_groups(self.checkpoints.of_all_groups);
            }
        }
        Ok(self.checkpoints.folder.as_ref())
    }

    /// Begins to write checkpoints in the current group. Returns one that was complete when the group before was lost, if the
    /// observer has not heard of it. Every rank must call it.
    pub(super) fn start_writer(&mut self) -> Result<Option<Complete>> {
        let in_background = self.config.checkpoints.as_ref().is_some_and(|plan| plan.in_background);
        let Some(folder) = self.checkpoints.folder.clone().filter(|_| in_background) else { return Ok(None) };
        let mut saver = BackgroundSaver::new(&**self.model.mesh().world(), folder)?;
        let mut unobserved = None;
        if let Writer::Abandoned { at_work, complete } = &mut self.checkpoints.writer {
            (saver.before, unobserved) = (at_work.take(), complete.take());
        }
        self.checkpoints.writer = Writer::InBackground(saver);
        Ok(unobserved)
    }

    /// Resumes from the latest checkpoint in the folder, if there is one, and returns its step. Call on every rank.
    ///
    /// # Errors
    /// Those of [`resume`](Self::resume).
    pub fn resume_latest(&mut self) -> Result<Option<usize>> {
        let Some(CheckpointPlan { dir, keep, .. }) = self.config.checkpoints.clone() else { return Ok(None) };
        let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.clone(), keep })?;
        let (world, groups) = (self.model.world().clone(), self.model.layout().far);
        // The first rank determines which checkpoint is the latest.
        let found = match world.rank() {
            0 => far::latest(&checkpoints, groups),
            _ => Ok(None),
        };
        let step = all_agree(&*world, found)?.map(|contents| contents.step);
        let Some(step) = broadcast_object(&*world, &step, 0)? else { return Ok(None) };
        let same = |contents: Option<Contents>| contents.filter(|contents| contents.step == step);
        let own = far::latest(&checkpoints, groups).and_then(|contents| {
            let problem = "rank 0 finds another checkpoint there: all ranks must see one folder";
            same(contents).ok_or_else(|| Error::file(&dir, problem))
        });
        let contents = all_agree(&*world, own)?;
        self.resume(&contents)?;
        Ok(Some(self.done.step))
    }

    /// Resumes from the last checkpoint of this run: the latest in the folder, if the run has written any, and otherwise the one that it
    /// began from, if there was one. Returns its step. Call on every rank.
    pub(super) fn resume_own(&mut self) -> Result<Option<usize>> {
        let Some(CheckpointPlan { dir, keep, .. }) = self.config.checkpoints.clone() else { return Ok(None) };
        let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.clone(), keep })?;
        let (world, Origin { resumed, mark }) = (self.job.world.clone(), self.checkpoints.origin.clone());
        // The files tell it: the rank that has completed a checkpoint may be the one that is lost.
        let has_own = if world.rank() == 0 { checkpoints.mark().map(|now| now != mark) } else { Ok(false) };
        if broadcast_object(&*world, &all_agree(&*world, has_own.map_err(Error::from))?, 0)? {
            return self.resume_latest();
        }
        let Some(resumed) = resumed else { return Ok(None) };
        let contents = checkpoints.contents(&dir.join(resumed)).map_err(Error::from);
        self.resume(&all_agree(&*world, contents)?)?;
        Ok(Some(self.done.step))
    }

    /// Resumes from a checkpoint. Call on every rank, with the same one; with `far`, each group goes on from its own of the same
    /// step, if it has written any. The configuration may differ; [`check_resume`]
    /// returns the differences.
    ///
    /// # Errors
    /// A damaged checkpoint; one of another model, or of other data or another order of the data; failures of
    /// communication.
    pub fn resume(&mut self, contents: &Contents) -> Result<()> {
        let own = match self.model.far() {
            Some(far) => all_agree(&**self.model.world(), far::own(contents, far.number()))?,
            None => None,
        };
        let resumed = &contents.folder;
        let contents = own.as_ref().unwrap_or(contents);
        let refuse = |problem: String| Error::file(&contents.folder, problem);
        all_agree(&**self.model.mesh().world(), check_resume(contents, &*self.batches.data, &self.config))?;
        self.wait_for_copies();
        self.model.load_checkpoint(contents, Some(&mut self.optimizer))?;
        if own.is_none() && self.model.far().is_some_and(|far| far.number() > 0) {
            self.optimizer.far().into_iter().for_each(|far| far.forget_unsent());
        }
        let state =
            serde_json::from_value(contents.sampler.clone()).map_err(|error| refuse(error.to_string()))?;
        self.batches.resume(&state).map_err(|error| refuse(error.to_string()))?;
        let step = contents.step as usize;
        // At the last step all groups average, if they have not.
        let averaged = if step == self.config.steps { 0 } else { step };
        self.done = Done { step, averaged, evaluated: step, latest: None, ..self.done };
        (self.checkpoints.begun, self.checkpoints.written) = (step, step);
        self.begin_from(Some(resumed))?;
        if self.has_elastic_groups() {
            self.checkpoints.set_of_all_groups(step);
        }
        if step > self.config.steps {
            let help = format!("the checkpoint is at step {step} already: give more");
            return Err(Error::invalid("the steps", self.config.steps, help));
        }
        Ok(())
    }

    /// Waits for the checkpoint that is being written.
    pub(super) fn finish(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let Writer::InBackground(saver) = &mut self.checkpoints.writer else { return Ok(()) };
        let Some(folder) = saver.wait()? else { return Ok(()) };
        self.checkpoints.written = self.checkpoints.begun;
        observer.saved(self.checkpoints.written, &folder)
    }

    /// After the first step, takes the memory for the copies that checkpoints are written from.
    pub(super) fn reserve_copies(&mut self) -> Result<()> {
        let Writer::InBackground(saver) = &mut self.checkpoints.writer else { return Ok(()) };
        // Variables of other devices would be copied now.
        if saver.begins_to_reserve() && self.model.named_vars().iter().all(|(_, var)| var.device().is_cpu()) {
            saver.reserve(&self.model.snapshot_later(Some(&self.optimizer))?);
        }
        Ok(())
    }

    /// Waits until the checkpoint's copies are made, because the variables must not change before.
    pub(super) fn wait_for_copies(&mut self) {
        let Writer::InBackground(saver) = &mut self.checkpoints.writer else { return };
        let began = Instant::now();
        saver.wait_for_copy();
        self.summary.checkpoint_seconds += began.elapsed().as_secs_f64();
    }

    /// Whether a checkpoint is due. Groups of an elastic run with `far` write theirs after an average, the last one of which all groups
    /// have made when the next is due.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        let every = self.config.checkpoints.as_ref().map(|plan| plan.every);
        if !self.has_elastic_groups() {
            return self.is_due(every, self.checkpoints.begun);
        }
        let (step, begun) = (self.done.step, self.checkpoints.begun);
        let is_over = |every: usize| begun / every < step / every || step == self.config.steps;
        self.is_after_average() && begun < step && every.is_some_and(is_over)
    }

    /// Whether the model may replace that of an earlier checkpoint: not after a loss that is not finite, in any group of `far`. Every rank
    /// must call it.
    pub(super) fn may_save(&self) -> Result<bool> {
        if self.has_elastic_groups() {
            // The last average has told, and checkpoints are written after averages.
            return Ok(self.done.notice.diverged == 0);
        }
        let is_finite = self.has_finite_loss();
        self.model.far().map_or(Ok(is_finite), |far| far.all(is_finite))
    }

    /// Whether the loss of the last step, if there was one, is finite.
    pub(super) fn has_finite_loss(&self) -> bool {
        self.done.latest.is_none_or(|latest| latest.loss.is_finite())
    }

    /// Writes a checkpoint of the current step, or begins to.
    pub(super) fn write_checkpoint(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let began = Instant::now();
        tracing::info_span!("checkpoint").in_scope(|| self.save(observer))?;
        self.checkpoints.begun = self.done.step;
        self.checkpoints.is_of_all = true;
        self.summary.checkpoints += 1;
        self.summary.checkpoint_seconds += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// Begins to ask whether the run is to stop early. Every rank must call it.
    pub(super) fn start_stop_check(&mut self) {
        let check = |flag| StopCheck::new(flag, self.model.world().clone(), self.config.fewest_ranks);
        self.stop = self.config.stop.clone().map(check);
    }

    /// Writes a checkpoint and ends the run with [`Error::Stopped`], if that is asked for.
    pub(super) fn stop_if_asked(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        if self.has_elastic_groups() {
            return self.stop_groups(observer);
        }
        // Groups that train on their own hear of it when they average.
        if self.model.far().is_some() && !self.config.far.is_due(self.done.step) {
            return Ok(());
        }
        let Some(check) = &mut self.stop else { return Ok(()) };
        let Some(Stop { signal, leaves }) = check.decide()? else { return Ok(()) };
        if self.checkpoints.folder.is_some() && self.checkpoints.begun < self.done.step && self.may_save()? {
            self.write_checkpoint(observer)?;
        }
        self.finish(observer)?;
        // A launcher may end all ranks when the first one ends: by then all files must be complete.
        self.stop.as_ref().map_or(Ok(()), StopCheck::wait_for_all)?;
        if leaves { Err(Error::Stopped { step: self.done.step, signal }) } else { Ok(()) }
    }

    /// Of an elastic run with `far`: all groups stop after the average in which one of them asks for it.
    fn stop_groups(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let cause = self.done.notice.stop;
        if cause == 0 || !self.is_after_average() {
            return Ok(());
        }
        if self.checkpoints.folder.is_some() && self.checkpoints.begun < self.done.step && self.may_save()? {
            self.write_checkpoint(observer)?;
        }
        self.finish(observer)?;
        self.model.far().map_or(Ok(()), FarGroups::wait_for_all)?;
        Err(Error::Stopped { step: self.done.step, signal: signal_of(cause) })
    }

    fn save(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let Some(checkpoints) = &self.checkpoints.folder else { return Ok(()) };
        observer.saving(self.done.step)?;
        let state = match self.model.mesh().world().rank() {
            0 => observer.state(),
            _ => Ok(ObserverState::default()),
        };
        let ObserverState { values, tensors } = all_agree(&**self.model.mesh().world(), state)?;
        let (data, settings) = (self.batches.data.fingerprint(), self.config.settings.clone());
        let sampler = serde_json::to_value(self.batches.state())
            .map_err(|error| Error::invalid("a checkpoint", "state", error.to_string()))?;
        let optimizer = self.config.optimizer.name().to_string();
        let far = self.model.far().map(FarRun::of);
        let extra = CheckpointExtra { data, optimizer, far, settings, observer: values };
        let checkpoint = extra.at(self.batches.epoch(), self.done.step as u64, sampler, tensors)?;
        // In an elastic run, the last average has waited for them.
        let others = self.model.far().filter(|_| !self.has_elastic_groups()).cloned();
        match &mut self.checkpoints.writer {
            Writer::InBackground(saver) => {
                // Before another copy is made, so that there is only one in memory.
                if let Some(folder) = saver.wait()? {
                    self.checkpoints.written = self.checkpoints.begun;
                    observer.saved(self.checkpoints.begun, &folder)?;
                }
                others.as_ref().map_or(Ok(()), FarGroups::wait_for_all)?;
                let snapshot = self.model.snapshot_later(Some(&self.optimizer));
                let snapshot = all_agree(&**self.model.mesh().world(), snapshot)?;
                // The optimizer's next step waits until the copy is made; forward and backward do not.
                saver.begin(snapshot, checkpoint).map(drop)
            }
            Writer::BetweenSteps | Writer::Abandoned { .. } => {
                others.as_ref().map_or(Ok(()), FarGroups::wait_for_all)?;
                let folder = self.model.save_checkpoint(checkpoints, Some(&self.optimizer), &checkpoint)?;
                self.checkpoints.written = self.done.step;
                observer.saved(self.done.step, &folder)
            }
        }
    }
}
