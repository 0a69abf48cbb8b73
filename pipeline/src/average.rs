//! Gradients over ranks that have the same stages: averaged as soon as they are complete, while others are still computed.

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_core::{Tensor, TensorId};
use comm::{Communicator, ReduceOp, Work};
use training::DeferredGrads;

use crate::gradients::Gradients;
use crate::news::News;
use crate::stage::Stage;
use crate::{Action, ActionKind, Error, Result};

/// The averaging of one step.
pub(crate) struct Average<'a> {
    comm: Option<&'a dyn Communicator>,
    news: &'a News,
    last: &'a [usize],
    bucket_bytes: usize,
    /// Complete, and to be averaged with those that come next; all of one dtype.
    bucket: Vec<Tensor>,
    bytes: usize,
    begun: HashSet<TensorId>,
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
    pub(crate) fn new(
        comm: Option<&'a dyn Communicator>,
        news: &'a News,
        last: &'a [usize],
        bucket_bytes: usize,
    ) -> Self {
        let (bucket, begun, works) = Default::default();
        Self { comm, news, last, bucket_bytes, bucket, bytes: 0, begun, works }
    }

    /// Whether the action at this place of the list is the last one for its stage, and there is something to average.
    pub(crate) fn completes(&self, place: usize) -> bool {
        self.comm.is_some() && self.last.contains(&place)
    }

    /// Computes the last gradients of a stage; each goes on its way once it is complete.
    pub(crate) fn compute(
        &mut self,
        stage: &Stage,
        deferred: DeferredGrads,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let mut missing: HashMap<TensorId, usize> = HashMap::new();
        deferred.weights().for_each(|id| *missing.entry(id).or_default() += 1);
        let there = stage.vars.iter().map(|(_, var)| var.id()).filter(|id| !missing.contains_key(id));
        for id in there.collect::<Vec<_>>() {
            self.add(id, gradients).map_err(|error| self.news.cause(error))?;
        }
        let mut failed = None;
        let computed = deferred.compute(|id, gradient| {
            gradients.add_shared(id, &gradient)?;
            let left = missing.get_mut(&id).map(|count| {
                *count -= 1;
                *count
            });
            if left == Some(0) && failed.is_none() {
                failed = self.add(id, gradients).err();
            }
            Ok(())
        });
        computed.map_err(Error::during("the gradients of weights"))?;
        match failed {
            Some(error) => Err(self.news.cause(error)),
            None => self.flush().map_err(|error| self.news.cause(error)),
        }
    }

    /// Averages the sum of a variable's gradients with the next ones, or begins to.
    fn add(&mut self, id: TensorId, gradients: &Gradients) -> comm::Result<()> {
        let Some(sum) = gradients.of_id(id).filter(|sum| sum.dtype().is_float()) else { return Ok(()) };
        if !self.begun.insert(id) {
            return Ok(());
        }
        if self.bucket.first().is_some_and(|first| first.dtype() != sum.dtype()) {
            self.flush()?;
        }
        self.bytes += sum.elem_count() * sum.dtype().size_in_bytes();
        self.bucket.push(sum.clone());
        if self.bytes >= self.bucket_bytes { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> comm::Result<()> {
        let tensors = std::mem::take(&mut self.bucket);
        self.bytes = 0;
        if let (Some(comm), false) = (self.comm, tensors.is_empty()) {
            self.works.push(comm.all_reduce_coalesced(&tensors, ReduceOp::Avg)?);
        }
        Ok(())
    }

    pub(crate) fn wait(&mut self) -> Result<()> {
        let works = std::mem::take(&mut self.works);
        works.into_iter().try_for_each(Work::wait).map_err(|error| self.news.cause(error))
    }
}
