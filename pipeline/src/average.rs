//! Data-parallel gradient averaging over ranks with the same stages, overlapped with the rest of backward.

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_core::{Tensor, TensorId, Var};
use ops::DeferredGrads;
use strategy::{BucketAverage, ParameterGroups};
use training::internal::GradSums;

use crate::failure_reports::FailureReports;
use crate::stage::Stage;
use crate::{Action, ActionKind, Error, Result};

/// The averaging of one step.
pub(crate) struct Average<'a> {
    /// `None` if nothing is averaged.
    groups: Option<&'a ParameterGroups>,
    /// By index of a group.
    buckets: Vec<BucketAverage>,
    failures: &'a FailureReports,
    last: &'a [usize],
    begun: HashSet<TensorId>,
    /// Per stage and group: the variables that are sent, and flags for whether this replica has a gradient of each; after the
    /// all-reduce, whether any replica has one.
    present: Vec<(Vec<Var>, Tensor)>,
}

/// Returns the positions in a rank's list of actions after which a stage's gradients are complete.
pub(crate) fn completion_positions(actions: &[Action]) -> Vec<usize> {
    let mut last = BTreeMap::new();
    for (index, action) in actions.iter().enumerate() {
        if matches!(action.kind, ActionKind::Backward | ActionKind::BackwardWeight) {
            last.insert(action.stage, index);
        }
    }
    last.into_values().collect()
}

impl<'a> Average<'a> {
    pub(crate) fn new(
        groups: Option<&'a ParameterGroups>,
        failures: &'a FailureReports,
        last: &'a [usize],
        bucket_bytes: usize,
    ) -> Self {
        let each = groups.into_iter().flat_map(ParameterGroups::groups);
        let buckets = each.map(|comm| BucketAverage::new(comm.clone(), bucket_bytes)).collect();
        Self { groups, buckets, failures, last, begun: HashSet::new(), present: Vec::new() }
    }

    /// Returns true if the action at this position is the last one for its stage, and gradients are averaged.
    pub(crate) fn completes(&self, index: usize) -> bool {
        self.groups.is_some() && self.last.contains(&index)
    }

    /// Computes the last gradients of a stage. Each is sent once it is complete, in the same order on all ranks of a group, which
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
        let vars = stage.by_module.iter().rev().map(|(name, var)| (self.index_of(name), var.clone()));
        let mut vars: Vec<(usize, Var)> = vars.collect();
        vars.retain(|(_, var)| var.dtype().is_float() && self.begun.insert(var.id()));
        let (mut next, mut flags) = (0, Vec::with_capacity(vars.len()));
        let mut send = |average: &mut Self, missing: &HashMap<TensorId, usize>, gradients: &mut GradSums| {
            while let Some((group, var)) =
                vars.get(next).filter(|(_, var)| missing.get(&var.id()).is_none_or(|left| *left == 0))
            {
                flags.push(gradients.of(var).is_some());
                average.add(*group, var, gradients)?;
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
        let ended = failed.map_or(Ok(()), Err).and_then(|()| self.exchange_presence(&vars, &flags));
        ended.map_err(|error| self.failures.cause(error))
    }

    /// The index of a variable's group.
    fn index_of(&self, name: &str) -> usize {
        self.groups.map_or(0, |groups| groups.index_of(name))
    }

    /// Starts to average the sum of a variable's gradients over its group.
    fn add(&mut self, group: usize, var: &Var, gradients: &mut GradSums) -> comm::Result<()> {
        if gradients.of(var).is_none() {
            gradients.set(var, GradSums::zeros(var)?);
        }
        let (Some(buckets), Some(sum)) = (self.buckets.get_mut(group), gradients.of(var)) else {
            return Ok(());
        };
        buckets.add(sum)
    }

    /// Sends the last gradients, and determines which variables have a gradient on any replica.
    fn exchange_presence(&mut self, vars: &[(usize, Var)], flags: &[bool]) -> comm::Result<()> {
        for (group, buckets) in self.buckets.iter_mut().enumerate() {
            let own = vars.iter().zip(flags).filter(|((of, _), _)| *of == group);
            let (own, flags): (Vec<Var>, Vec<bool>) =
                own.map(|((_, var), flag)| (var.clone(), *flag)).unzip();
            let Some(first) = own.first() else { continue };
            let flags = buckets.any(&flags, first.device())?;
            self.present.push((own, flags));
        }
        Ok(())
    }

    /// Waits for all averages; removes the gradients of variables of which no replica has one.
    pub(crate) fn wait(&mut self, gradients: &mut GradSums) -> Result<()> {
        let waited = self.buckets.iter_mut().try_for_each(BucketAverage::wait);
        waited.map_err(|error| self.failures.cause(error))?;
        for (vars, flags) in std::mem::take(&mut self.present) {
            let flags = flags.to_vec1::<u8>().map_err(Error::during("the gradients"))?;
            vars.iter().zip(flags).filter(|(_, flag)| *flag == 0).for_each(|(var, _)| gradients.unset(var));
        }
        Ok(())
    }
}
