//! Elastic training: a run continues when ranks are lost, and with new ones that replace them.

mod groups;
mod new_ranks;
mod progress;
mod undo;

use std::sync::Arc;

use comm::{Communicator, Operation, all_gather_object};
use training::build::Model;

use self::progress::{Holders, Progress, RanksProgress, state_lost, staying};
use super::checkpoints::Complete;
use super::consistency::check_equal_on_all_ranks;
use super::optimizer::RunOptimizer;
use super::{Observer, ObserverState, Regrouping, Trainer};
use crate::agreement::all_agree;
use crate::{Error, Layout, Result};
use strategy::DistributedModel;
use strategy::checkpoint::{Receiver, transfer};

pub use new_ranks::{size_with_new_ranks, wait_for_new_ranks};
pub use progress::Joining;

/// The ranks of a job, and where this one stands among them.
pub(super) struct Job {
    /// The group of all ranks; while it changes, the model is in the one before.
    pub(super) world: Arc<dyn Communicator>,
    /// The layout of the job with all its ranks.
    pub(super) whole: Layout,
    /// Number of times that the model was built again in another layout, after the loss of ranks.
    rebuilds: usize,
    pub(super) state: RankState,
}

/// Which state of the job a rank has.
pub(super) enum RankState {
    /// None: it is about to join a running job, of which the other ranks have told it this.
    Joining(Joining),
    /// Not all of it: it has the progress of the other ranks, and does not count as one of them yet.
    New,
    /// None of the model: that was built again, and is to be loaded from a checkpoint.
    Unloaded,
    /// All of it.
    Ready,
}

impl Job {
    /// Returns the job of a rank that has been in it from the beginning.
    pub(super) fn new(world: Arc<dyn Communicator>, whole: Layout) -> Self {
        Self { world, whole, rebuilds: 0, state: RankState::Ready }
    }

    fn is_new(&self) -> bool {
        matches!(self.state, RankState::Joining(_) | RankState::New)
    }

    /// The model was built again. A new rank stays one until it has everything.
    fn set_unloaded(&mut self) {
        if let RankState::Ready = self.state {
            self.state = RankState::Unloaded;
        }
    }

    /// The model has its state.
    fn set_loaded(&mut self) {
        if let RankState::Unloaded = self.state {
            self.state = RankState::Ready;
        }
    }
}

/// Why the group changes.
enum Change {
    /// A rank was lost: the error of an operation.
    Lost(Error),
    /// Some ranks are not needed, and leave.
    SparesLeave,
    /// New ranks wait to join; the group will have so many.
    Grows(usize),
    /// This rank is new in the group, and has the progress of the others.
    Joined(Joining),
}

/// How a run continues in a changed group.
enum Outcome {
    GoesOn {
        /// Whether some ranks are new.
        with_new_ranks: bool,
    },
    WithoutSpares,
    /// It is complete.
    IsOver,
}

impl<M: Model> Trainer<'_, M> {
    /// Handles the loss of a rank: continues with the remaining ranks, if they are enough. Any other error is returned.
    /// Returns false if the run is complete.
    pub(super) fn recover(&mut self, error: Error, observer: &mut dyn Observer<M>) -> Result<bool> {
        self.regroup(Change::Lost(error), observer)
    }

    /// On a rank that joins a running job: receives the state from the other ranks. Returns false if the run is complete.
    pub(super) fn join(&mut self, observer: &mut dyn Observer<M>) -> Result<bool> {
        match std::mem::replace(&mut self.job.state, RankState::New) {
            RankState::Joining(joining) => self.regroup(Change::Joined(joining), observer),
            state => {
                self.job.state = state;
                Ok(true)
            }
        }
    }

    /// Admits new ranks, between two steps, if some wait and a larger layout has a place for them. Returns whether some
    /// have joined.
    pub(super) fn admit_new_ranks(&mut self, observer: &mut dyn Observer<M>) -> Result<bool> {
        if self.config.replacement.is_none() {
            return Ok(false);
        }
        let size = match self.has_elastic_groups() {
            // The ranks have told each other in the last average.
            true => self.groups_with_new_ranks(),
            false => size_with_new_ranks(&*self.job.world, |waiting| self.larger(waiting))?,
        };
        match size {
            Some(ranks) => {
                // The group that writes it ends.
                self.finish(observer)?;
                self.regroup(Change::Grows(ranks), observer)
            }
            None => Ok(false),
        }
    }

    /// Changes the group of all ranks, and continues in it.
    fn regroup(&mut self, mut change: Change, observer: &mut dyn Observer<M>) -> Result<bool> {
        let (before, mut lost) = (self.job.world.clone(), None);
        loop {
            let outcome = match change {
                Change::Lost(error) => {
                    let Some(loss) = error.loss().filter(|_| self.config.fewest_ranks.is_some()).cloned()
                    else {
                        return Err(error);
                    };
                    self.job.world = self.job.world.elastic()?.shrink()?;
                    self.check_fewest(self.job.world.world_size(), &loss)?;
                    lost = Some(loss);
                    self.go_on(None, lost.as_ref(), observer)
                }
                Change::SparesLeave => {
                    self.job.world = self.job.world.elastic()?.shrink()?;
                    self.go_on(None, lost.as_ref(), observer)
                }
                Change::Grows(ranks) => {
                    self.job.world = self.job.world.elastic()?.grow(ranks)?;
                    self.go_on(None, lost.as_ref(), observer)
                }
                Change::Joined(joining) => {
                    lost = joining.lost;
                    self.go_on(Some(joining.ranks), lost.as_ref(), observer)
                }
            };
            change = match outcome {
                Ok(Outcome::IsOver) => return Ok(false),
                Ok(Outcome::WithoutSpares) => Change::SparesLeave,
                Ok(Outcome::GoesOn { with_new_ranks }) => {
                    match self.settle(with_new_ranks, &before, lost.as_ref(), observer) {
                        Ok(Some(ranks)) => Change::Grows(ranks),
                        Ok(None) => return Ok(true),
                        Err(error) => Change::Lost(error),
                    }
                }
                Err(error) => Change::Lost(error),
            };
        }
    }

    /// Refuses to go on with too few ranks, if no new ones can come.
    fn check_fewest(&self, left: usize, lost: &comm::Error) -> Result<()> {
        match self.config.fewest_ranks.filter(|fewest| left < *fewest && self.config.replacement.is_none()) {
            Some(fewest) => Err(Error::TooFewRanks { left, fewest, lost: lost.clone() }),
            None => Ok(()),
        }
    }

    /// Ends the change of the group, or if the ranks are too few, waits for new ones and returns their number with these.
    fn settle(
        &mut self,
        with_new_ranks: bool,
        before: &Arc<dyn Communicator>,
        lost: Option<&comm::Error>,
        observer: &mut dyn Observer<M>,
    ) -> Result<Option<usize>> {
        let ranks = self.wait_for_replacements(lost)?;
        if ranks.is_some() {
            return Ok(ranks);
        }
        let state = if with_new_ranks { self.observer_of_others(observer)? } else { None };
        let layout = *self.model.layout();
        let change =
            Regrouping { before, world: &self.job.world, layout: &layout, epoch: self.epoch(), lost };
        match state {
            Some(state) => observer.joined(self.done.step, state, &change)?,
            None => observer.regrouped(self.done.step, &change)?,
        }
        self.job.state = RankState::Ready;
        Ok(None)
    }

    /// Sends new ranks the state of the first other rank's observer. Returns it on the new ranks.
    fn observer_of_others(&self, observer: &dyn Observer<M>) -> Result<Option<ObserverState>> {
        let world = &*self.job.world;
        let joined: Vec<bool> = all_gather_object(world, &!self.job.is_new())?;
        let first = joined.iter().position(|joined| *joined).unwrap_or(0);
        let own = if world.rank() == first { observer.state() } else { Ok(ObserverState::default()) };
        let state = all_agree(world, own)?.broadcast(world, first)?;
        Ok(self.job.is_new().then_some(state))
    }

    /// Waits for new ranks, if these are too few. Returns the number of ranks with them, or `None` if these are enough.
    fn wait_for_replacements(&self, lost: Option<&comm::Error>) -> Result<Option<usize>> {
        let (fewest, replacement) = (self.config.fewest_ranks.unwrap_or(1), self.config.replacement);
        let within = replacement.map(|replacement| replacement.within);
        wait_for_new_ranks(&*self.job.world, fewest, within, lost, |waiting| self.larger(waiting))
    }

    /// Continues in another group, with the state of the ranks that have done most steps.
    fn go_on(
        &mut self,
        known: Option<RanksProgress>,
        lost: Option<&comm::Error>,
        observer: &mut dyn Observer<M>,
    ) -> Result<Outcome> {
        self.checkpoints.abandon();
        self.optimizer.forget_group();
        let (world, is_built) = (&self.job.world.clone(), known.is_some());
        let ranks = match known {
            Some(ranks) => ranks,
            None if !observer.regrouping(world)? => return Ok(Outcome::IsOver),
            None => RanksProgress::of(&**world, (!self.job.is_new()).then(|| self.progress()))?,
        };
        if self.job.is_new() {
            self.checkpoints.origin = ranks.origin()?.clone();
        }
        let layout = ranks.layout(lost)?;
        if layout.ranks() < world.world_size() {
            if let (true, Some(lost)) = (ranks.are_far()?, lost) {
                self.check_fewest(layout.ranks(), lost)?;
            }
            return match staying(&ranks, &layout)?.contains(&world.rank()) {
                true => Ok(Outcome::WithoutSpares),
                false => Err(Error::NotNeeded { layout }),
            };
        }
        match ranks.holders() {
            _ if ranks.are_far()? => self.take_state_in_groups(&layout, is_built, &ranks, lost, observer)?,
            Some(holders) => {
                self.take_state(&layout, is_built, &ranks, &holders, observer)?;
                // What some ranks have not completed, all ranks repeat.
                self.done.evaluated = ranks.least(|progress| progress.evaluated).min(self.done.step);
                self.checkpoints.written = ranks.least(|progress| progress.written).min(self.done.step);
                self.checkpoints.begun = self.checkpoints.written;
            }
            None => self.start_from_checkpoint(&layout, is_built, &ranks, lost)?,
        }
        if ranks.has_new_ranks() {
            match check_equal_on_all_ranks(self.model, &*self.batches.data, &self.config) {
                // A new rank that differs leaves, and the others go on without it.
                Err(Error::Differ(_)) if !self.job.is_new() => {}
                outcome => outcome?,
            }
        }
        self.check_batch()?;
        // The lost rank may not have completed its part of the work after the last step.
        self.done.final_tasks = 0;
        let complete = self.start_writer()?;
        self.start_stop_check();
        if let Some(Complete { step, folder }) = complete.filter(|at| at.step == self.checkpoints.written) {
            observer.saved(step, &folder)?;
        }
        Ok(Outcome::GoesOn { with_new_ranks: ranks.has_new_ranks() })
    }

    fn progress(&self) -> Progress {
        let layout = *self.model.layout();
        Progress {
            step: self.done.step,
            order: self.batches.state(),
            seat: self.model.far().map_or(0, |far| far.share_of_batch().0),
            averaged: self.done.averaged,
            notice: self.done.notice,
            evaluated: self.done.evaluated,
            written: self.checkpoints.written,
            of_all_groups: self.checkpoints.of_all_groups,
            report: self.done.latest,
            layout,
            whole: self.job.whole,
            batch: (self.config.batch_size, self.model.config().micro_batches),
            rebuilds: self.job.rebuilds,
            keeps_checkpoints: self.checkpoints.folder.is_some(),
            origin: self.checkpoints.origin.clone(),
            grows: self.config.replacement.is_some(),
            place: matches!(self.job.state, RankState::Ready).then(|| self.model.place()),
        }
    }

    /// Continues with the state that the holders have in memory, in the new layout. A new rank's model `is_built` in it
    /// already, by the same calls.
    fn take_state(
        &mut self,
        layout: &Layout,
        is_built: bool,
        ranks: &RanksProgress,
        holders: &Holders<'_>,
        observer: &mut dyn Observer<M>,
    ) -> Result<()> {
        let world = self.job.world.clone();
        let (is_holder, offers) = (holders.is_holder[world.rank()], holders.first.contains(&world.rank()));
        let rebuilds = !self.model.is_copied() || ranks.has_new_ranks();
        let build = || self.model.rebuilt(world.clone(), layout);
        let mut rebuilt = (rebuilds && !is_built).then(build).transpose()?;
        if rebuilds || holders.is_holder.contains(&false) {
            let held = is_holder.then(|| self.model.snapshot_as_only_copy(&self.optimizer)).transpose();
            let held = all_agree(&*world, held)?;
            let of = |model| RunOptimizer::new(model, &self.config.optimizer, &self.config.far);
            let mut optimizer = rebuilt.as_ref().map(of).transpose()?;
            let receiver = Receiver {
                pieces: rebuilt.as_ref().unwrap_or(self.model).pieces()?,
                optimizer: optimizer.as_mut().unwrap_or(&mut self.optimizer),
            };
            let receiver = (rebuilds || !is_holder).then_some(receiver);
            let receives = receiver.is_some();
            let loss_scale = transfer(&*world, held.as_ref(), offers, receiver)?;
            if receives {
                rebuilt.as_mut().unwrap_or(self.model).set_loss_scale(loss_scale);
            }
            if rebuilds {
                // Only when all ranks have their parts does any of them give up its part in the layout before.
                world.run(Operation::Barrier)?;
            }
            if let (Some(model), Some(optimizer)) = (rebuilt, optimizer) {
                (*self.model, self.optimizer) = (model, optimizer);
            }
        }
        // What this rank has now is what it tells next, also if another one is lost before the group is set up.
        self.batches.resume(&holders.progress.order)?;
        self.job.rebuilds = holders.progress.rebuilds + usize::from(rebuilds);
        self.job.set_loaded();
        self.go_on_from(holders.progress, observer)?;
        if rebuilds { Ok(()) } else { self.model.regroup(world) }
    }

    /// This rank is where another one of the same state is.
    fn go_on_from(&mut self, progress: &Progress, observer: &mut dyn Observer<M>) -> Result<()> {
        let behind = self.done.step < progress.step;
        (self.done.step, self.done.latest) = (progress.step, progress.report);
        match self.done.latest.filter(|_| behind && !self.job.is_new()) {
            Some(report) => {
                self.count(report);
                observer.stepped(&report)
            }
            None => Ok(()),
        }
    }

    /// Continues from the last checkpoint of this run, because no rank that is left holds what the lost one held.
    fn start_from_checkpoint(
        &mut self,
        layout: &Layout,
        is_built: bool,
        ranks: &RanksProgress,
        lost: Option<&comm::Error>,
    ) -> Result<()> {
        ranks.check_state(lost)?;
        if !is_built {
            let model = self.model.rebuilt(self.job.world.clone(), layout)?;
            self.optimizer = RunOptimizer::new(&model, &self.config.optimizer, &self.config.far)?;
            *self.model = model;
        }
        self.job.set_unloaded();
        // What is still being written must be the same on all ranks.
        self.checkpoints.wait_for_abandoned();
        self.job.world.run(Operation::Barrier)?;
        self.resume_own()?.ok_or_else(|| state_lost(lost))?;
        self.job.rebuilds = ranks.rebuilds() + 1;
        self.job.set_loaded();
        Ok(())
    }

    /// Refuses a group with more ranks (times micro-batches) than a batch has rows.
    fn check_batch(&self) -> Result<()> {
        let parts = self.model.data_ranks().world_size() * self.model.config().micro_batches;
        if self.config.batch_size >= parts {
            return Ok(());
        }
        let help = format!("the ranks that are left take {parts} parts of it: give more rows");
        Err(Error::invalid("the batch size", self.config.batch_size, help))
    }
}
