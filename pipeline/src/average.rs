//! Data-parallel gradient averaging over ranks with the same stages, overlapped with the rest of backward.

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_core::{Tensor, TensorId, Var};
use comm::{Communicator, ReduceOp, Work};
use training::{DeferredGrads, GradSums};

use crate::failure_reports::FailureReports;
use crate::stage::Stage;
use crate::{Action, ActionKind, Error, Result};

/// The averaging of one step.
pub(crate) struct Average<'a> {
    comm: Option<&'a dyn Communicator>,
    failures: &'a FailureReports,
    last: &'a [usize],
    bucket_bytes: usize,
    /// Complete gradients that are to be averaged together with the next ones; all of one dtype.
    bucket: Vec<Tensor>,
    bytes: usize,
    begun: HashSet<TensorId>,
    works: Vec<Work>,
    /// Per stage: the variables that are sent, and flags for whether this replica has a gradient of each; after the
    /// all-reduce, whether any replica has one.
    present: Vec<(Vec<Var>, Tensor)>,
}

/// Returns the positions in a rank's list of actions after which a stage's gradients are complete.
pub(crate) fn completion_positions(actions: &[Action]) -> Vec<usize> {
    let mut last = BTreeMap::new();
    for (place, action) in actions.iter().enumerate() {
        if matches!(action.kind, ActionKind::Backward | ActionKind::BackwardWeight) {
            last.insert(action.stage, place);
        }
    }
    last.into_values().collect()
}

impl<'a> Average<'a> {
    pub(crate) fn new(
        comm: Option<&'a dyn Communicator>,
        failures: &'a FailureReports,
        last: &'a [usize],
        bucket_bytes: usize,
    ) -> Self {
        let (bucket, begun, works, present) = Default::default();
        Self { comm, failures, last, bucket_bytes, bucket, bytes: 0, begun, works, present }
    }

    /// Returns true if the action at this position is the last one for its stage, and gradients are averaged.
    pub(crate) fn completes(&self, place: usize) -> bool {
        self.comm.is_some() && self.last.contains(&place)
    }

    /// Computes the last gradients of a stage. Each is sent once it is complete, in the same order on all replicas, which
    /// need not use the same variables. A missing gradient counts as zero.
    pub(crate) fn compute(
        &mut self,
        stage: &Stage,
        deferred: DeferredGrads,
        gradients: &mut GradSums,
    ) -> Result<()> {
        let mut missing: HashMap<TensorId, usize> = HashMap::new();
        deferred.weights().for_each(|id| *missing.entry(id).or_default() += 1);
        // Backward computes the gradients of the last modules first.
        let vars = stage.by_module.iter().rev().cloned();
        let vars: Vec<Var> =
            vars.filter(|var| var.dtype().is_float() && self.begun.insert(var.id())).collect();
        let (mut next, mut flags) = (0, Vec::with_capacity(vars.len()));
        let mut send = |average: &mut Self, missing: &HashMap<TensorId, usize>, gradients: &mut GradSums| {
            while let Some(var) =
                vars.get(next).filter(|var| missing.get(&var.id()).is_none_or(|left| *left == 0))
            {
                flags.push(u8::from(gradients.of(var).is_some()));
                average.add(var, gradients)?;
                next += 1;
            }
            Ok(())
        };
        let mut failed = send(self, &missing, gradients).err();
        let computed = deferred.compute(|id, gradient| {
            gradients.add_shared(id, &gradient)?;
            if let Some(left) = missing.get_mut(&id) {
                *left -= 1;
            }
            if failed.is_none() {
                failed = send(self, &missing, gradients).err();
            }
            Ok(())
        });
        computed.map_err(Error::during("the gradients of weights"))?;
        let ended = failed
            .map_or(Ok(()), Err)
            .and_then(|()| self.flush())
            .and_then(|()| self.exchange_presence(vars, flags));
        ended.map_err(|error| self.failures.cause(error))
    }

    /// Adds the sum of a variable's gradients to the bucket, and starts to average the bucket if it is full.
    fn add(&mut self, var: &Var, gradients: &mut GradSums) -> comm::Result<()> {
        if gradients.of(var).is_none() {
            gradients.set(var, GradSums::zeros(var)?);
        }
        let Some(sum) = gradients.of(var) else { return Ok(()) };
        if self.bucket.first().is_some_and(|first| first.dtype() != sum.dtype()) {
            self.flush()?;
        }
        self.bytes += sum.elem_count() * sum.dtype().size_in_bytes();
        self.bucket.push(sum.clone());
        if self.bytes >= self.bucket_bytes { self.flush() } else { Ok(()) }
    }

    /// Starts to determine which variables have a gradient on any replica.
    fn exchange_presence(&mut self, vars: Vec<Var>, flags: Vec<u8>) -> comm::Result<()> {
        let (Some(comm), Some(first)) = (self.comm, vars.first()) else { return Ok(()) };
        let flags = Tensor::new(flags, first.device())?;
        self.works.push(comm.all_reduce(&flags, ReduceOp::Max)?);
        self.present.push((vars, flags));
        Ok(())
    }

    fn flush(&mut self) -> comm::Result<()> {
        let tensors = std::mem::take(&mut self.bucket);
        self.bytes = 0;
        if let (Some(comm), false) = (self.comm, tensors.is_empty()) {
            self.works.push(comm.all_reduce_coalesced(&tensors, ReduceOp::Avg)?);
        }
        Ok(())
    }

    /// Waits for all averages; removes the gradients of variables of which no replica has one.
    pub(crate) fn wait(&mut self, gradients: &mut GradSums) -> Result<()> {
        let works = std::mem::take(&mut self.works);
        works.into_iter().try_for_each(Work::wait).map_err(|error| self.failures.cause(error))?;
        for (vars, flags) in std::mem::take(&mut self.present) {
            let flags = flags.to_vec1::<u8>().map_err(Error::during("the gradients"))?;
            vars.iter().zip(flags).filter(|(_, flag)| *flag == 0).for_each(|(var, _)| gradients.unset(var));
        }
        Ok(())
    }
}
