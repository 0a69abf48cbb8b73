//! What a rank does for an operation: on which buffer, by which schedule.

use candle_core::{DType, Tensor};

use crate::memory::Memory;
use crate::schedule::{Combine, Parts, Schedule, Step, Transfer};
use crate::{Operation, ReduceOp, Result, algorithm, fingerprint, storage};

pub(crate) struct Plan<'a> {
    pub(crate) memory: Memory<'a>,
    pub(crate) schedule: Schedule,
    /// The elements that the schedule counts.
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// What any two ranks must agree on beside the fingerprint, by peer.
    pub(crate) pairs: Vec<u64>,
}

/// Plans for one rank.
pub(crate) struct Planner {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

type Counts = Option<Vec<usize>>;

impl Planner {
    /// A plan for an operation that was found to have no mistakes.
    pub(crate) fn plan<'a>(&self, operation: &'a Operation) -> Result<Plan<'a>> {
        Ok(match operation {
            Operation::AllReduce { tensor, op } => self.all_reduce(tensor, *op)?,
            Operation::Reduce { tensor, op, root } => self.reduce(tensor, *op, *root)?,
            Operation::Broadcast { tensor, root } => self.broadcast(tensor, *root),
            Operation::AllGather { output, input, counts } => self.all_gather(output, input, counts),
            Operation::ReduceScatter { output, input, op, counts } => {
                self.reduce_scatter(output, input, *op, counts)?
            }
            Operation::Gather { output, input, root, counts } => {
                let parts = self.parts(input.elem_count() * self.world_size, counts);
                let memory = output.iter().fold(Memory::of(input), Memory::tensor);
                let schedule = algorithm::direct_gather::schedule(self.rank, &parts, *root);
                Plan::copying(memory, schedule, input)
            }
            Operation::Scatter { output, input, root, counts } => {
                let parts = self.parts(output.elem_count() * self.world_size, counts);
                let memory = input.iter().fold(Memory::default(), Memory::tensor).tensor(output);
                let schedule = algorithm::direct_scatter::schedule(self.rank, &parts, *root);
                Plan::copying(memory, schedule, output)
            }
            Operation::AllToAll { output, input, output_counts, input_counts } => {
                self.all_to_all(output, input, output_counts, input_counts)
            }
            Operation::Barrier => {
                let schedule = algorithm::dissemination_barrier::schedule(self.rank, self.world_size);
                let memory = Memory::default().room(1);
                Plan { memory, schedule, dtype: DType::U8, op: ReduceOp::Max, pairs: Vec::new() }
            }
            Operation::Send { tensor, to } => {
                let transfer = Transfer::Send { to: *to, range: 0..tensor.elem_count() };
                Plan::copying(Memory::of(tensor), message(transfer), tensor)
            }
            Operation::Recv { tensor, from } => {
                let range = 0..tensor.elem_count();
                let transfer = Transfer::Recv { from: *from, range, combine: Combine::Replace };
                Plan::copying(Memory::of(tensor), message(transfer), tensor)
            }
        })
    }

    fn all_reduce<'a>(&self, tensor: &'a Tensor, op: ReduceOp) -> Result<Plan<'a>> {
        let memory = summed(Memory::default(), tensor)?;
        let size = widened(tensor.dtype()).size_in_bytes();
        let schedule = algorithm::all_reduce(self.rank, self.world_size, tensor.elem_count(), size);
        Ok(Plan::reducing(memory, schedule, tensor, op))
    }

    fn reduce<'a>(&self, tensor: &'a Tensor, op: ReduceOp, root: usize) -> Result<Plan<'a>> {
        let len = tensor.elem_count();
        let schedule = algorithm::binomial_reduce::schedule(self.rank, self.world_size, len, root);
        let memory = if self.rank == root { summed(Memory::default(), tensor)? } else { own_copy(tensor)? };
        Ok(Plan::reducing(memory, schedule, tensor, op))
    }

    fn broadcast<'a>(&self, tensor: &'a Tensor, root: usize) -> Plan<'a> {
        let len = tensor.elem_count();
        let schedule = algorithm::binomial_broadcast::schedule(self.rank, self.world_size, len, root);
        Plan::copying(Memory::of(tensor), schedule, tensor)
    }

    fn all_gather<'a>(&self, output: &'a Tensor, input: &'a Tensor, counts: &Counts) -> Plan<'a> {
        let parts = self.parts(output.elem_count(), counts);
        let (own, first) = (input.elem_count(), parts.of(self.rank).start);
        let ring = algorithm::ring_all_gather::schedule(self.rank, &parts).shifted(own);
        let schedule = Schedule::copying(0..own, own + first).then(ring);
        Plan::copying(Memory::of(input).tensor(output), schedule, input)
    }

    fn reduce_scatter<'a>(
        &self,
        output: &'a Tensor,
        input: &'a Tensor,
        op: ReduceOp,
        counts: &Counts,
    ) -> Result<Plan<'a>> {
        let parts = self.parts(input.elem_count(), counts);
        let room = algorithm::ring_reduce_scatter::room(&parts) * widened(input.dtype()).size_in_bytes();
        let memory = summed(own_input(input)?, output)?.room(room);
        let schedule = algorithm::ring_reduce_scatter::schedule(self.rank, &parts);
        Ok(Plan::reducing(memory, schedule, input, op))
    }

    fn all_to_all<'a>(
        &self,
        output: &'a Tensor,
        input: &'a Tensor,
        output_counts: &Counts,
        input_counts: &Counts,
    ) -> Plan<'a> {
        let incoming = self.parts(output.elem_count(), output_counts);
        let outgoing = self.parts(input.elem_count(), input_counts);
        let schedule = algorithm::pairwise_all_to_all::schedule(self.rank, &outgoing, &incoming);
        let plan = Plan::copying(Memory::of(input).tensor(output), schedule, input);
        Plan { pairs: pairs(self.rank, &outgoing, &incoming), ..plan }
    }

    /// Equal parts of so many elements, unless there are counts.
    fn parts(&self, whole: usize, counts: &Counts) -> Parts {
        match counts {
            Some(counts) => Parts::uneven(counts),
            None => Parts::even(whole, self.world_size),
        }
    }
}

impl<'a> Plan<'a> {
    fn copying(memory: Memory<'a>, schedule: Schedule, like: &Tensor) -> Self {
        Self { memory, schedule, dtype: like.dtype(), op: ReduceOp::Sum, pairs: Vec::new() }
    }

    fn reducing(memory: Memory<'a>, schedule: Schedule, like: &Tensor, op: ReduceOp) -> Self {
        Self { memory, schedule, dtype: widened(like.dtype()), op, pairs: Vec::new() }
    }
}

/// f16 and bf16 are summed in f32.
fn widened(dtype: DType) -> DType {
    if storage::is_half(dtype) { DType::F32 } else { dtype }
}

/// Appends a tensor that sums are written to.
fn summed<'a>(memory: Memory<'a>, tensor: &'a Tensor) -> Result<Memory<'a>> {
    if storage::is_half(tensor.dtype()) { memory.wide(tensor, true) } else { Ok(memory.tensor(tensor)) }
}

/// A tensor whose elements are summed, and that is not written to.
fn own_input(tensor: &Tensor) -> Result<Memory<'_>> {
    let memory = Memory::default();
    if storage::is_half(tensor.dtype()) { memory.wide(tensor, false) } else { Ok(memory.tensor(tensor)) }
}

/// A copy to sum in.
fn own_copy(tensor: &Tensor) -> Result<Memory<'_>> {
    if storage::is_half(tensor.dtype()) { own_input(tensor) } else { Memory::default().copy_of(tensor) }
}

fn message(transfer: Transfer) -> Schedule {
    Schedule { steps: vec![Step { transfers: vec![transfer], finished: 0..0 }] }
}

/// For each peer, what goes from the lower to the higher of the two ranks and back: the same on both.
fn pairs(rank: usize, outgoing: &Parts, incoming: &Parts) -> Vec<u64> {
    let pair = |peer: usize| {
        let (out, back) = (outgoing.of(peer).len(), incoming.of(peer).len());
        fingerprint::digest(if rank < peer { [out, back] } else { [back, out] })
    };
    (0..outgoing.count()).map(pair).collect()
}
