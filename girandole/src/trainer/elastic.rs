//! Elastic training: a run continues when ranks are lost.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Tensor, Var};
use comm::{Communicator, Operation, all_gather_object};
use sampler::SamplerState;
use serde::{Deserialize, Serialize};
use training::build::Model;

use super::{BackgroundSaver, Observer, StepReport, Trainer};
use crate::checkpoint::{Receiver, all_or_error, transfer};
use crate::{Error, Layout, Result};

/// Progress of a rank, and what it holds of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Progress {
    step: usize,
    /// Position in the data. May differ between ranks at the same step: some may have skipped rows without targets.
    order: SamplerState,
    evaluated: usize,
    written: usize,
    report: Option<StepReport>,
    layout: Layout,
    /// Number of times that the model has been built again in another layout.
    rebuilds: usize,
    /// Its ranks along `pp`, `shard` and `tp`; `None` while it has no state.
    place: Option<[usize; 3]>,
}

/// The ranks that together hold the model after one step.
struct Holders<'a> {
    /// Whether a rank is at that step, in the same layout.
    is_holder: Vec<bool>,
    /// One for each part of the model.
    first: Vec<usize>,
    /// The progress of the one that is furthest in the data.
    progress: &'a Progress,
}

impl<'a> Holders<'a> {
    /// Finds the latest step after which the remaining ranks hold the whole model. A collective that loses a rank may
    /// succeed on some of the others and fail on the rest, so some may have done one step more.
    fn of(all: &'a [Progress]) -> Option<Self> {
        let key = |progress: &Progress| (progress.step, progress.rebuilds);
        let mut keys: Vec<_> = all.iter().map(key).collect();
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter().rev().find_map(|wanted| {
            let is_holder = |progress: &Progress| key(progress) == wanted && progress.place.is_some();
            let is_holder: Vec<bool> = all.iter().map(is_holder).collect();
            let holders = || all.iter().enumerate().filter(|(rank, _)| is_holder[*rank]);
            let mut first = BTreeMap::new();
            for (rank, place) in holders().filter_map(|(rank, progress)| Some((rank, progress.place?))) {
                first.entry(place).or_insert(rank);
            }
            let place = |progress: &Progress| (progress.order.epoch, progress.order.consumed);
            let (_, progress) = holders().rev().max_by_key(|(_, progress)| place(progress))?;
            let Layout { pp, shard, tp, .. } = progress.layout;
            let first: Vec<usize> = first.into_values().collect();
            (first.len() == pp * shard * tp).then_some(Self { is_holder, first, progress })
        })
    }
}

/// How a run continues after the loss of a rank.
enum Recovery {
    GoesOn,
    /// Some of the remaining ranks are not needed, and leave: the others form a group once more.
    WithoutSpares,
}

impl<M: Model> Trainer<'_, M> {
    /// Handles the loss of a rank: continues with the remaining ranks, if they are enough. Any other error is returned.
    /// Returns false if the run is complete.
    pub(super) fn recover(&mut self, error: Error, observer: &mut dyn Observer<M>) -> Result<bool> {
        let (mut error, mut world) = (error, self.model.mesh().world().clone());
        let (before, mut lost) = (world.world_size(), None);
        loop {
            let (Some(fewest), Some(loss)) = (self.config.fewest_ranks, error.loss().cloned()) else {
                return Err(error);
            };
            let lost = &*lost.insert(loss);
            let mut outcome = Ok(Recovery::WithoutSpares);
            while let Ok(Recovery::WithoutSpares) = outcome {
                world = world.elastic()?.shrink()?;
                if world.world_size() < fewest {
                    let left = world.world_size();
                    return Err(Error::TooFewRanks { left, fewest, lost: lost.clone() });
                }
                outcome = match observer.lost(&world) {
                    Ok(true) => self.go_on(&world, lost, observer),
                    Ok(false) => return Ok(false),
                    Err(error) => Err(error),
                };
            }
            error = match outcome {
                Ok(_) => {
                    let left = (&world, self.model.layout());
                    return observer.regrouped(self.step, before, lost, left).map(|()| true);
                }
                Err(error) => error,
            };
        }
    }

    /// Continues in another group, with the state of the ranks that have done most steps.
    fn go_on(
        &mut self,
        world: &Arc<dyn Communicator>,
        lost: &comm::Error,
        observer: &mut dyn Observer<M>,
    ) -> Result<Recovery> {
        self.abandon_checkpoint();
        let all: Vec<Progress> = all_gather_object(&**world, &self.progress())?;
        let holders = Holders::of(&all);
        // Not this rank's own: if another rank was lost during this, some may be in the new layout already.
        let begun = holders.as_ref().map_or(&all[0], |holders| holders.progress).layout;
        let (batch_size, micro_batches) = (self.config.batch_size, self.model.config().micro_batches);
        let Some(layout) = begun.for_fewer(all.len(), batch_size, micro_batches) else {
            let fewest = begun.ranks() / begun.data_ranks();
            return Err(Error::TooFewRanks { left: all.len(), fewest, lost: lost.clone() });
        };
        if layout.ranks() < all.len() {
            // Those that are the only holders of a part stay.
            let first = holders.as_ref().map_or(&[][..], |holders| &holders.first);
            let others = (0..all.len()).filter(|rank| !first.contains(rank));
            let stay: Vec<usize> = first.iter().copied().chain(others).take(layout.ranks()).collect();
            return match stay.contains(&world.rank()) {
                true => Ok(Recovery::WithoutSpares),
                false => Err(Error::NotNeeded { layout }),
            };
        }
        match &holders {
            Some(holders) => {
                self.take_state(world, &layout, holders, observer)?;
                // What some ranks have not completed, all ranks repeat.
                let least = |of: fn(&Progress) -> usize| all.iter().map(of).min().unwrap_or(0).min(self.step);
                self.evaluated = least(|progress| progress.evaluated);
                self.written = least(|progress| progress.written);
                self.checkpointed = self.written;
            }
            None => self.start_from_checkpoint(world, &layout, lost)?,
        }
        self.check_batch()?;
        // The lost rank may not have completed its part of the work after the last step.
        self.ended = 0;
        if let (Some(plan), Some(checkpoints)) = (&self.config.checkpoints, &self.checkpoints)
            && plan.in_background
        {
            let mut saver = BackgroundSaver::new(&**world, checkpoints.clone())?;
            saver.before = self.abandoned.take();
            self.saver = Some(saver);
        }
        if let Some((step, folder)) = self.unobserved.take().filter(|(step, _)| self.written == *step) {
            observer.saved(step, &folder)?;
        }
        Ok(Recovery::GoesOn)
    }

    /// Abandons a checkpoint that is being written: a part of it was lost with a rank, so the one before is the latest.
    fn abandon_checkpoint(&mut self) {
        let Some(mut saver) = self.saver.take() else { return };
        saver.wait_for_copy();
        let (completed, abandoned) = saver.abandon();
        self.abandoned = abandoned;
        if let Some(folder) = completed {
            self.written = self.checkpointed;
            self.unobserved = Some((self.written, folder));
        }
    }

    fn progress(&self) -> Progress {
        Progress {
            step: self.step,
            order: self.order.state(),
            evaluated: self.evaluated,
            written: self.written,
            report: self.latest,
            layout: *self.model.layout(),
            rebuilds: self.rebuilds,
            place: self.has_state.then(|| self.model.place()),
        }
    }

    /// Continues with the state that the holders have in memory, in the new layout.
    fn take_state(
        &mut self,
        world: &Arc<dyn Communicator>,
        layout: &Layout,
        holders: &Holders<'_>,
        observer: &mut dyn Observer<M>,
    ) -> Result<()> {
        let is_holder = holders.is_holder[world.rank()];
        let offers = holders.first.contains(&world.rank());
        let held = || is_holder.then(|| self.model.snapshot_as_first_copy(&self.optimizer)).transpose();
        if self.model.is_copied() {
            if holders.is_holder.contains(&false) {
                let held = all_or_error(&**world, held())?;
                let (model, optimizer) = (&mut *self.model, &mut self.optimizer);
                let receiver = (!is_holder).then_some(Receiver { model, optimizer });
                transfer(&**world, held.as_ref(), offers, receiver)?;
            }
            self.put_back(&holders.progress.order)?;
            self.model.regroup(world.clone())?;
        } else {
            let held = all_or_error(&**world, held())?;
            let mut model = self.model.rebuilt(world.clone(), layout)?;
            let mut optimizer = Self::optimizer(&model, &self.config)?;
            let receiver = Receiver { model: &mut model, optimizer: &mut optimizer };
            transfer(&**world, held.as_ref(), offers, Some(receiver))?;
            self.put_back(&holders.progress.order)?;
            // Only when all ranks have their parts does any of them give up its part in the layout before.
            world.run(Operation::Barrier)?;
            (*self.model, self.optimizer, self.rebuilds) = (model, optimizer, self.rebuilds + 1);
        }
        let behind = self.step < holders.progress.step;
        (self.step, self.latest) = (holders.progress.step, holders.progress.report);
        match self.latest.filter(|_| behind) {
            Some(report) => {
                self.count(report);
                observer.stepped(&report)
            }
            None => Ok(()),
        }
    }

    /// Continues from the latest checkpoint, because no rank that is left holds what the lost one held.
    fn start_from_checkpoint(
        &mut self,
        world: &Arc<dyn Communicator>,
        layout: &Layout,
        lost: &comm::Error,
    ) -> Result<()> {
        let lost = || Error::StateLost { lost: lost.clone() };
        if self.checkpoints.is_none() {
            return Err(lost());
        }
        let model = self.model.rebuilt(world.clone(), layout)?;
        self.optimizer = Self::optimizer(&model, &self.config)?;
        (*self.model, self.has_state) = (model, false);
        self.resume_latest()?.ok_or_else(lost)?;
        (self.rebuilds, self.has_state) = (self.rebuilds + 1, true);
        Ok(())
    }

    /// Copies the running statistics, because a step may be repeated and its forward changes them. Empty in runs that
    /// are not elastic.
    pub(super) fn kept_buffers(&self) -> Result<Vec<(Var, Tensor)>> {
        if self.config.fewest_ranks.is_none() {
            return Ok(Vec::new());
        }
        let kept = |(_, var): (String, Var)| Ok((var.clone(), var.as_detached_tensor().copy()?));
        self.model.buffers().into_iter().map(kept).collect()
    }

    /// Restores an earlier position in the data.
    pub(super) fn put_back(&mut self, order: &SamplerState) -> Result<()> {
        self.order.resume(order).map_err(|error| Error::invalid("the data", "rows", error.to_string()))
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
