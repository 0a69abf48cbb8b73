//! Plans for f16 and bf16 that send the elements in their own dtype and reduce them in f32.

use candle_core::Tensor;

use crate::ReduceOp;
use crate::algorithm::schedule::{Parts, Schedule};
use crate::algorithm::{
    LATENCY_BYTES, PAIRWISE_RANKS, pairwise_all_reduce, pairwise_reduce, pairwise_reduce_scatter,
};
use crate::base::buffer::storage;
use crate::engine::memory::Memory;

use super::{Plan, Planner};

impl Planner {
    /// Returns `None` if the ring, the tree or the chain in f32 is better: for other dtypes; for little data, which
    /// takes few steps that way; with too many ranks for all of them to exchange data with each other; and with several
    /// ranks on several hosts, where each element would cross the network more than once.
    pub(super) fn halves_all_reduce<'a>(&self, tensors: &'a [Tensor], op: ReduceOp) -> Option<Plan<'a>> {
        let first = tensors.first().filter(|_| !self.topology.is_hierarchical())?;
        let len = tensors.iter().map(Tensor::elem_count).sum();
        let segment = self.halves_segment(first, len)?;
        let size = first.dtype().size_in_bytes();
        let room = pairwise_all_reduce::room(self.world_size, len, segment) * size;
        let memory = tensors.iter().fold(Memory::default(), Memory::tensor).scratch(room);
        let schedule = pairwise_all_reduce::schedule(self.rank, self.world_size, len, segment);
        Some(Plan::narrow(memory, schedule, first, op))
    }

    /// See [`Planner::halves_all_reduce`].
    pub(super) fn halves_reduce<'a>(
        &self,
        tensor: &'a Tensor,
        op: ReduceOp,
        root: usize,
    ) -> Option<Plan<'a>> {
        let len = tensor.elem_count();
        let segment = self.halves_segment(tensor, len)?;
        let room = pairwise_reduce::room(self.world_size, len, segment) * tensor.dtype().size_in_bytes();
        let schedule = pairwise_reduce::schedule(self.rank, self.world_size, len, root, segment);
        Some(Plan::narrow(Memory::of(tensor).scratch(room), schedule, tensor, op))
    }

    /// One step instead of P-1, so it is used for little data as well. But with several ranks per host, much data is
    /// sent between hosts only once, in f32.
    pub(super) fn halves_reduce_scatter<'a>(
        &self,
        output: &'a Tensor,
        input: &'a Tensor,
        op: ReduceOp,
        parts: &Parts,
    ) -> Option<Plan<'a>> {
        let widened = parts.len().saturating_mul(size_of::<f32>());
        let once = self.topology.is_regular() && widened > LATENCY_BYTES;
        (self.is_pairwise(input) && !once).then(|| {
            let room = pairwise_reduce_scatter::room(self.rank, parts) * input.dtype().size_in_bytes();
            let memory = Memory::of(input).output(output).scratch(room);
            Plan::narrow(memory, pairwise_reduce_scatter::schedule(self.rank, parts), input, op)
        })
    }

    fn is_pairwise(&self, tensor: &Tensor) -> bool {
        storage::is_half(tensor.dtype()) && (2..=PAIRWISE_RANKS).contains(&self.world_size)
    }

    /// Returns the number of elements of a segment, if the elements are to be sent in their own dtype.
    fn halves_segment(&self, tensor: &Tensor, len: usize) -> Option<usize> {
        let widened = len.saturating_mul(size_of::<f32>());
        (self.is_pairwise(tensor) && widened > LATENCY_BYTES)
            .then(|| self.topology.segment_bytes() / tensor.dtype().size_in_bytes())
    }
}

impl<'a> Plan<'a> {
    fn narrow(memory: Memory<'a>, schedule: Schedule, like: &Tensor, op: ReduceOp) -> Self {
        Self { op, ..Self::copying(memory, schedule, like) }
    }
}
