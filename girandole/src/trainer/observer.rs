//! What is told of a training run while it goes on: reports of steps, and an observer's callbacks.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;
use comm::{Communicator, broadcast_object, broadcast_tensors};
use serde::{Deserialize, Serialize};

use crate::{Evaluation, ExpertLoad, Layout, Parallel, PreferenceReport};

/// Report of one training step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of the step, from 1, including those before a resume.
    pub step: usize,
    /// The epoch of the step's first row, from 0.
    pub epoch: u64,
    /// Mean loss over all targets.
    pub loss: f64,
    /// Loss that balances experts, with its coefficient, which is not a part of `loss`; `None` without one.
    pub balance_loss: Option<f64>,
    /// Of the router with the least balanced experts, the share of the busiest one in all choices; `None` if it is not counted.
    pub busiest_expert: Option<f64>,
    /// Norm of the gradients before clipping; infinite if the step was skipped.
    pub grad_norm: f64,
    /// Factor of the loss in backward: 1 without [`ParallelConfig::loss_scale`](crate::ParallelConfig::loss_scale).
    pub loss_scale: f64,
    /// Whether a gradient was not finite on some rank, so that nothing was changed.
    pub skipped: bool,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// Number of targets that counted; of pairs, that of their answers' tokens. With `far`, those of this group times the number of
    /// groups.
    pub targets: usize,
    /// What was found of pairs, if the rows have them.
    pub preferences: Option<PreferenceReport>,
    /// Time since the previous step.
    pub seconds: f64,
    /// Time that this rank's groups spent in collectives in this step, including waiting for other ranks; it may
    /// overlap with computation.
    pub communication_seconds: f64,
    /// The part of that time in which another rank had not started the same collective yet
    /// ([`Stats::waited_ns`](comm::Stats::waited_ns)).
    pub waiting_seconds: f64,
}

/// State of an [`Observer`] that is stored in checkpoints.
#[derive(Debug, Clone, Default)]
pub struct ObserverState {
    /// Everything except tensors. Default: null.
    pub values: serde_json::Value,
    /// Tensors on the CPU. Default: none.
    pub tensors: HashMap<String, Tensor>,
}

impl ObserverState {
    /// Returns the state that rank `root` gives, on every rank. Every rank of `comm` must call it.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn broadcast(self, comm: &dyn Communicator, root: usize) -> crate::Result<Self> {
        let values = broadcast_object(comm, &self.values, root)?;
        let mut tensors: Vec<(String, Tensor)> = self.tensors.into_iter().collect();
        tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
        let tensors = broadcast_tensors(comm, tensors, root)?.into_iter().collect();
        Ok(Self { values, tensors })
    }
}

/// A change of the group of all ranks.
#[derive(Debug)]
pub struct Regrouping<'a> {
    /// The group before; of a rank that has joined a running job, the current one.
    pub before: &'a Arc<dyn Communicator>,
    /// The current group.
    pub world: &'a Arc<dyn Communicator>,
    /// The current layout.
    pub layout: &'a Layout,
    /// The epoch of the next row.
    pub epoch: u64,
    /// The last loss of a rank, if any was lost.
    pub lost: Option<&'a comm::Error>,
}

/// Callbacks during training. All ranks call them in the same order; a rank that reports nothing may ignore them.
pub trait Observer<M> {
    /// Called after each step.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn stepped(&mut self, _report: &StepReport) -> crate::Result<()> {
        Ok(())
    }

    /// Called after an evaluation on the evaluation data. May use the model, in the same way on all ranks.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn evaluated(
        &mut self,
        _step: usize,
        _evaluation: &Evaluation,
        _model: &mut Parallel<M>,
    ) -> crate::Result<()> {
        Ok(())
    }

    /// Returns the state to store in a checkpoint, for a run that resumes from it ([`observer_state`](super::observer_state)), or for new ranks
    /// ([`joined`](Self::joined)). Called on one rank only, for checkpoints on rank 0.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn state(&self) -> crate::Result<ObserverState> {
        Ok(ObserverState::default())
    }

    /// Called before a checkpoint of this step is written: the observer should flush its own files, which a run that
    /// resumes from it may need.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn saving(&mut self, _step: usize) -> crate::Result<()> {
        Ok(())
    }

    /// Called after ranks were lost ([`TrainConfig::fewest_ranks`](super::TrainConfig::fewest_ranks)) or new ones have joined, before anything else, with the
    /// group of all ranks. Returns whether the run goes on: false if one of them has returned from it already
    /// and so tells the others in this method's collectives, as all had then completed everything.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn regrouping(&mut self, _world: &Arc<dyn Communicator>) -> crate::Result<bool> {
        Ok(true)
    }

    /// Called when the ranks continue after a step, in another group; this rank's number may have changed. If the step is
    /// before one that was reported already, the steps after it are repeated.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn regrouped(&mut self, _step: usize, _change: &Regrouping<'_>) -> crate::Result<()> {
        Ok(())
    }

    /// Called in place of [`regrouped`](Self::regrouped) on a rank that has joined a running job, with the
    /// [`state`](Self::state) of another rank's observer.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn joined(&mut self, _step: usize, _state: ObserverState, _change: &Regrouping<'_>) -> crate::Result<()> {
        Ok(())
    }

    /// Called after [`stepped`](Self::stepped) with the load of each expert in that step, of all ranks, if it is counted
    /// ([`ParallelConfig::balance`](crate::ParallelConfig::balance)).
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn routed(&mut self, _step: usize, _loads: &[ExpertLoad]) -> crate::Result<()> {
        Ok(())
    }

    /// Called after a checkpoint is written.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn saved(&mut self, _step: usize, _folder: &Path) -> crate::Result<()> {
        Ok(())
    }
}

/// An observer that does nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl<M> Observer<M> for NoObserver {}
