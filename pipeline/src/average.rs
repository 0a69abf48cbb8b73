//! Gradients over ranks that have the same stages: averaged as soon as a stage has all of its own.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use comm::{Communicator, ReduceOp, Work};

use crate::gradients::Gradients;
use crate::stage::Stage;
use crate::{Action, ActionKind, Result};

/// The averaging of one step.
pub(crate) struct Average<'a> {
    comm: Option<&'a dyn Communicator>,
    last: &'a [usize],
    works: Vec<Work>,
}

/// The places in a rank's list of actions after which a stage's gradients are complete.
pub(crate) fn last_places(actions: &[Action]) -> Vec<usize> {
    let mut last = BTreeMap::new();
    for (place, action) in actions.iter().enumerate() {
        if matches!(action.kind, ActionKind::Backward | ActionKind::BackwardWeight) {
            last.insert(action.stage, place);
        }
    }
    last.into_values().collect()
}

impl<'a> Average<'a> {
    pub(crate) fn new(comm: Option<&'a dyn Communicator>, last: &'a [usize]) -> Self {
        Self { comm: comm.filter(|comm| comm.world_size() > 1), last, works: Vec::new() }
    }

    pub(crate) fn completes(&self, place: usize) -> bool {
        self.comm.is_some() && self.last.contains(&place)
    }

    /// Begins to average a stage's gradients, and returns at once.
    pub(crate) fn begin(&mut self, stage: &Stage, gradients: &Gradients) -> Result<()> {
        let Some(comm) = self.comm else { return Ok(()) };
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let all = stage.vars.iter().filter_map(|(_, var)| gradients.of(var));
            let tensors: Vec<Tensor> = all.filter(|gradient| gradient.dtype() == dtype).cloned().collect();
            if !tensors.is_empty() {
                self.works.push(comm.all_reduce_coalesced(&tensors, ReduceOp::Avg)?);
            }
        }
        Ok(())
    }

    pub(crate) fn wait(&mut self) -> Result<()> {
        Ok(std::mem::take(&mut self.works).into_iter().try_for_each(Work::wait)?)
    }
}
