//! Elastic training: a run continues when ranks are lost.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Tensor, Var};
use comm::{Communicator, all_gather_object, broadcast_object, broadcast_tensors};
use sampler::SamplerState;
use serde::{Deserialize, Serialize};
use training::build::Model;
use training::{LossScaler, LossScalerState, OptimizerState};

use super::{BackgroundSaver, Observer, StepReport, Trainer};
use crate::{Error, Result};

/// Progress of a rank. The steps of any two ranks are equal or differ by one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Progress {
    step: usize,
    /// Position in the data. May differ between ranks at the same step: some may have skipped rows without targets.
    order: SamplerState,
    evaluated: usize,
    written: usize,
}

/// What a rank that is one step behind receives from another one, in addition to tensors.
#[derive(Serialize, Deserialize)]
struct CatchUpState {
    order: SamplerState,
    loss_scale: Option<LossScalerState>,
    report: Option<StepReport>,
}

impl<M: Model> Trainer<'_, M> {
    /// Handles the loss of a rank: continues with the remaining ranks, if they are enough. Any other error is returned.
    /// Returns false if the run is complete.
    pub(super) fn recover(&mut self, error: Error, observer: &mut dyn Observer<M>) -> Result<bool> {
        let (mut error, mut world) = (error, self.model.mesh().world().clone());
        loop {
            let (Some(fewest), Some(lost)) = (self.config.fewest_ranks, error.loss().cloned()) else {
                return Err(error);
            };
            let before = world.world_size();
            world = world.elastic()?.shrink()?;
            if world.world_size() < fewest {
                return Err(Error::TooFewRanks { left: world.world_size(), fewest, lost });
            }
            let gone_on = match observer.lost(&world) {
                Ok(true) => self.go_on(&world, observer),
                Ok(false) => return Ok(false),
                Err(error) => Err(error),
            };
            error = match gone_on {
                Ok(()) => return observer.regrouped(self.step, before, &lost, &world).map(|()| true),
                Err(error) => error,
            };
        }
    }

    /// Continues in another group, with the state of a rank that has done most steps.
    fn go_on(&mut self, world: &Arc<dyn Communicator>, observer: &mut dyn Observer<M>) -> Result<()> {
        if let Some(mut saver) = self.saver.take() {
            // If a checkpoint is still being written, a part of it was lost with a rank: the one before is the latest.
            saver.wait_for_copy();
            let (completed, abandoned) = saver.abandon();
            self.abandoned = abandoned;
            if let Some(folder) = completed {
                self.written = self.checkpointed;
                self.unobserved = Some((self.written, folder));
            }
        }
        let own = Progress {
            step: self.step,
            order: self.order.state(),
            evaluated: self.evaluated,
            written: self.written,
        };
        let all: Vec<Progress> = all_gather_object(&**world, &own)?;
        let step = all.iter().map(|progress| progress.step).max().unwrap_or(self.step);
        let mut furthest = all.iter().enumerate().filter(|(_, progress)| progress.step == step);
        if let Some((ahead, _)) = furthest.clone().next()
            && all.iter().any(|progress| progress.step != step)
        {
            self.catch_up(&**world, ahead, step, observer)?;
        }
        let first = furthest.next();
        let order = furthest.fold(first, |found, other| {
            let place = |(_, progress): (usize, &Progress)| (progress.order.epoch, progress.order.consumed);
            if found.is_some_and(|found| place(found) >= place(other)) { found } else { Some(other) }
        });
        if let Some((_, Progress { order, .. })) = order {
            self.put_back(order)?;
        }
        // Parameters are equal on all ranks by now.
        self.model.regroup(world.clone())?;
        self.check_batch()?;
        // What some ranks have not completed, all ranks repeat.
        let least = |of: fn(&Progress) -> usize| all.iter().map(of).min().unwrap_or(0);
        self.evaluated = least(|progress| progress.evaluated);
        self.written = least(|progress| progress.written);
        self.checkpointed = self.written;
        // The lost rank may not have completed its part of the work after the last step.
        self.ended = 0;
        if let (Some(plan), Some(checkpoints)) = (&self.config.checkpoints, &self.checkpoints)
            && plan.in_background
        {
            let mut saver = BackgroundSaver::new(&**world, checkpoints.clone())?;
            saver.before = self.abandoned.take();
            self.saver = Some(saver);
        }
        match self.unobserved.take().filter(|(step, _)| self.written == *step) {
            Some((step, folder)) => observer.saved(step, &folder),
            None => Ok(()),
        }
    }

    /// Brings ranks that have not done the last step up to date, with the state of the rank `ahead`.
    fn catch_up(
        &mut self,
        world: &dyn Communicator,
        ahead: usize,
        step: usize,
        observer: &mut dyn Observer<M>,
    ) -> Result<()> {
        let is_ahead = world.rank() == ahead;
        let own = is_ahead.then(|| CatchUpState {
            order: self.order.state(),
            loss_scale: self.model.loss_scaler().map(LossScaler::state),
            report: self.latest,
        });
        let behind: Option<CatchUpState> = broadcast_object(world, &own, ahead)?;
        let vars: Vec<_> = self.model.named_vars().into_iter().chain(self.model.buffers()).collect();
        let values = || vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
        let values = broadcast_tensors(world, if is_ahead { values() } else { Vec::new() }, ahead)?;
        let state = if is_ahead { self.optimizer.state()? } else { Vec::new() };
        let state = broadcast_tensors(world, state, ahead)?;
        let Some(behind) = behind.filter(|_| self.step < step) else { return Ok(()) };
        let values: HashMap<String, Tensor> = values.into_iter().collect();
        for (name, var) in &vars {
            if let Some(value) = values.get(name) {
                var.set(value)?;
            }
        }
        self.optimizer.load_state(&state.into_iter().collect())?;
        if let (Some(scaler), Some(state)) = (self.model.loss_scaler_mut(), behind.loss_scale) {
            scaler.resume(state);
        }
        self.put_back(&behind.order)?;
        self.step = step;
        let Some(report) = behind.report else { return Ok(()) };
        self.count(report);
        observer.stepped(&report)
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
