//! Communication of buckets, and the broadcast of the model's buffers.

use std::collections::VecDeque;
use std::sync::Arc;

use comm::{Communicator, Operation, Work};

use super::{Reducer, State};
use crate::comm_hook::Reduction;
use crate::{Error, Result, lock};

/// A bucket that is being averaged.
pub(super) struct PendingBucket {
    index: usize,
    /// The ranks over which it is averaged.
    comm: Arc<dyn Communicator>,
    reduction: Box<dyn Reduction>,
    /// Its collective in progress; `None` if that has finished.
    work: Option<Work>,
}

impl Reducer {
    /// Starts to average the complete buckets, in order, except the last one: nothing remains to overlap it with, and a
    /// blocking call is faster.
    pub(super) fn start_complete(&self, state: &mut State) -> Result<()> {
        if !state.synchronise || self.comm().world_size() == 1 {
            return Ok(());
        }
        let last = state.buckets.plan.buckets.len().saturating_sub(1);
        while state.next < last && state.buckets.is_complete(state.next) {
            self.start_next(state)?;
        }
        Ok(())
    }

    fn start_next(&self, state: &mut State) -> Result<()> {
        // Continued here, and not as soon as possible, so that the order of collectives is the same on every rank.
        for bucket in state.pending.iter_mut().filter(|bucket| bucket.reduction.has_more()) {
            bucket.work.take().map_or(Ok(()), Work::wait)?;
            self.submit_next(bucket)?;
        }
        let mut bucket = self.begin_reduction(state)?;
        self.submit_next(&mut bucket)?;
        state.pending.push_back(bucket);
        Ok(())
    }

    /// Starts the next collective of a bucket; returns false if there is none.
    fn submit_next(&self, bucket: &mut PendingBucket) -> Result<bool> {
        let Some(operation) = bucket.reduction.next()? else { return Ok(false) };
        let span = bucket_span(bucket.index, &operation);
        bucket.work = Some(span.in_scope(|| bucket.comm.submit(operation))?);
        Ok(true)
    }

    fn begin_reduction(&self, state: &mut State) -> Result<PendingBucket> {
        let index = state.next;
        state.next += 1;
        let factor = state.weights.factor()?;
        let bucket = state.buckets.prepare(&self.gradients, index, factor);
        let bucket = bucket.map_err(Error::during("gathering gradients"))?;
        let group = state.buckets.plan.buckets[index].items.first().map_or(0, |item| self.items[*item].group);
        let comm = self.averaged_over.group(group).clone();
        let reduction: Box<dyn Reduction> = match comm.world_size() {
            // No other rank has replicas of these.
            1 => Box::new(Nothing),
            _ => self.hook.begin(bucket)?,
        };
        Ok(PendingBucket { index, comm, reduction, work: None })
    }

    /// Starts to average the remaining buckets, with zeros for parameters without a gradient, and waits until all are
    /// averaged.
    pub(super) fn wait(&self) -> Result<()> {
        if self.comm().world_size() == 1 {
            return Ok(());
        }
        let _span = tracing::info_span!("wait").entered();
        let (mut pending, buffers, last) = {
            let state = &mut *lock(&self.state);
            let count = state.buckets.plan.buckets.len();
            while state.next + 1 < count {
                self.start_next(state)?;
            }
            // Submitted at a position in the order of operations that is the same on every rank, and after backward, which
            // may read buffers.
            let buffers = self.send_buffers(state)?;
            let last = if state.next < count { Some(self.begin_reduction(state)?) } else { None };
            (std::mem::take(&mut state.pending), buffers, last)
        };
        if let Some(mut last) = last
            && self.run_next(&mut last)?
        {
            pending.push_back(last);
        }
        self.finish_all(pending)?;
        buffers.map_or(Ok(()), Work::wait)?;
        self.average_late()
    }

    fn send_buffers(&self, state: &mut State) -> Result<Option<Work>> {
        if self.buffers.is_empty() {
            return Ok(None);
        }
        let root = state.weights.first_with_data()?;
        let operation = Operation::BroadcastCoalesced { tensors: self.buffers.clone(), root };
        Ok(Some(self.comm().submit(operation)?))
    }

    /// Runs the next collective of a bucket; returns false if there is none.
    fn run_next(&self, bucket: &mut PendingBucket) -> Result<bool> {
        let Some(operation) = bucket.reduction.next()? else { return Ok(false) };
        bucket_span(bucket.index, &operation).in_scope(|| bucket.comm.run(operation))?;
        Ok(true)
    }

    /// Completes all buckets. Each goes to the back of the queue after a collective, so that the order of collectives is the
    /// same on every rank.
    fn finish_all(&self, mut pending: VecDeque<PendingBucket>) -> Result<()> {
        while let Some(mut bucket) = pending.pop_front() {
            bucket.work.take().map_or(Ok(()), Work::wait)?;
            if pending.is_empty() {
                while self.run_next(&mut bucket)? {}
            } else if self.submit_next(&mut bucket)? {
                pending.push_back(bucket);
            }
        }
        Ok(())
    }
}

/// The averaging of a bucket of a rank that is alone.
struct Nothing;

impl Reduction for Nothing {
    fn next(&mut self) -> Result<Option<Operation>> {
        Ok(None)
    }
}

fn bucket_span(index: usize, operation: &Operation) -> tracing::Span {
    let elements = match operation {
        Operation::AllReduce { tensor, .. } | Operation::AllToAll { input: tensor, .. } => {
            tensor.elem_count()
        }
        Operation::AllGather { output, .. } => output.elem_count(),
        _ => 0,
    };
    tracing::info_span!("bucket", index, elements)
}
