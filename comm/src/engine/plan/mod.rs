//! Plans: the buffer and the schedule with which a rank runs an operation.

mod half_precision;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::algorithm::schedule::{Parts, Schedule};
use crate::base::buffer::storage;
use crate::base::fingerprint::{self, CallKind};
use crate::engine::memory::Memory;
use crate::{Operation, ReduceOp, Result, Topology, algorithm};

pub(crate) struct Plan<'a> {
    pub(crate) memory: Memory<'a>,
    pub(crate) schedule: Arc<Schedule>,
    /// Type of the elements in which the schedule counts.
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// Digests, by peer, of what a pair of ranks must agree on beyond the fingerprint. Empty if there is nothing.
    pub(crate) pairs: Vec<u64>,
}

/// Plans for one rank.
pub(crate) struct Planner {
    rank: usize,
    world_size: usize,
    topology: Topology,
    /// The newest schedules: a program usually repeats the same calls. Making the schedule of a small operation can take longer
    /// than running it.
    recent: RefCell<VecDeque<(ScheduleKey, Arc<Schedule>)>>,
}

/// What the schedule of a call depends on, beside the rank and the topology.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ScheduleKey {
    kind: CallKind,
    /// Number of elements, and bytes of each.
    len: usize,
    size: usize,
    root: usize,
}

/// How many schedules are kept.
const RECENT: usize = 32;

/// Those of more steps are not kept: they take memory, and the operation takes much longer than making them.
const MOST_STEPS: usize = 256;

type Counts = Option<Vec<usize>>;

impl Planner {
    pub(crate) fn new(rank: usize, topology: Topology) -> Self {
        Self { rank, world_size: topology.world_size(), topology, recent: RefCell::default() }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    /// Plans an operation that has been validated.
    pub(crate) fn plan<'a>(&self, operation: &'a Operation) -> Result<Plan<'a>> {
        Ok(match operation {
            Operation::AllReduce { tensor, op } => self.all_reduce(std::slice::from_ref(tensor), *op)?,
            Operation::Reduce { tensor, op, root } => self.reduce(tensor, *op, *root)?,
            Operation::Broadcast { tensor, root } => self.broadcast(tensor, *root),
            Operation::AllGather { output, input, counts } => self.all_gather(output, input, counts),
            Operation::ReduceScatter { output, input, op, counts } => {
                self.reduce_scatter(output, input, *op, counts)?
            }
            Operation::Gather { output, input, root, counts } => {
                let parts = self.parts(input.elem_count() * self.world_size, counts);
                let memory = output.iter().fold(Memory::of(input), Memory::output);
                let schedule = algorithm::direct_gather::schedule(self.rank, &parts, *root);
                Plan::copying(memory, schedule, input)
            }
            Operation::Scatter { output, input, root, counts } => {
                let parts = self.parts(output.elem_count() * self.world_size, counts);
                let memory = input.iter().fold(Memory::default(), Memory::tensor).output(output);
                let schedule = algorithm::direct_scatter::schedule(self.rank, &parts, *root);
                Plan::copying(memory, schedule, output)
            }
            Operation::AllToAll { output, input, output_counts, input_counts } => {
                self.all_to_all(output, input, output_counts, input_counts)
            }
            Operation::Barrier => {
                let key = ScheduleKey { kind: CallKind::Barrier, len: 0, size: 1, root: 0 };
                let schedule = self.recent(key, || algorithm::barrier(self.rank, &self.topology));
                let memory = Memory::default().scratch(1);
                Plan { memory, schedule, dtype: DType::U8, op: ReduceOp::Max, pairs: Vec::new() }
            }
            Operation::AllReduceCoalesced { tensors, op } => self.all_reduce(tensors, *op)?,
            Operation::BroadcastCoalesced { tensors, root } => {
                // They may differ in dtype, so they are sent as bytes.
                let memory = tensors.iter().fold(Memory::default(), Memory::tensor);
                let schedule = self.broadcast_schedule(memory.len(), 1, *root);
                Plan { memory, schedule, dtype: DType::U8, op: ReduceOp::Sum, pairs: Vec::new() }
            }
            // Point-to-point messages need no plan.
            Operation::Send { .. } | Operation::Recv { .. } | Operation::Batch { .. } => Plan {
                memory: Memory::default(),
                schedule: Arc::default(),
                dtype: DType::U8,
                op: ReduceOp::Sum,
                pairs: Vec::new(),
            },
        })
    }

    /// All-reduces the tensors as one, without copying them together.
    fn all_reduce<'a>(&self, tensors: &'a [Tensor], op: ReduceOp) -> Result<Plan<'a>> {
        if let Some(plan) = self.halves_all_reduce(tensors, op) {
            return Ok(plan);
        }
        let memory = tensors.iter().try_fold(Memory::default(), summed)?;
        let dtype = tensors.first().map_or(DType::U8, |tensor| widened(tensor.dtype()));
        let len = tensors.iter().map(Tensor::elem_count).sum();
        let key = ScheduleKey { kind: CallKind::AllReduce, len, size: dtype.size_in_bytes(), root: 0 };
        let schedule =
            self.recent(key, || algorithm::all_reduce(self.rank, &self.topology, key.len, key.size));
        Ok(Plan { memory, schedule, dtype, op, pairs: Vec::new() })
    }

    fn reduce<'a>(&self, tensor: &'a Tensor, op: ReduceOp, root: usize) -> Result<Plan<'a>> {
        if let Some(plan) = self.halves_reduce(tensor, op, root) {
            return Ok(plan);
        }
        let (len, size) = (tensor.elem_count(), widened(tensor.dtype()).size_in_bytes());
        let is_root = self.rank == root;
        if let Some(segments) = algorithm::chain_segments(self.world_size, len, size) {
            let schedule = algorithm::chain_reduce::schedule(self.rank, self.world_size, len, root, segments);
            let room = algorithm::chain_reduce::room(len, segments) * size;
            let memory =
                if is_root { summed(Memory::default(), tensor)? } else { own_input(tensor)?.scratch(room) };
            return Ok(Plan::reducing(memory, schedule, tensor, op));
        }
        let schedule = algorithm::binomial_reduce::schedule(self.rank, self.world_size, len, root);
        let memory = if is_root { summed(Memory::default(), tensor)? } else { own_copy(tensor)? };
        Ok(Plan::reducing(memory, schedule, tensor, op))
    }

    fn broadcast<'a>(&self, tensor: &'a Tensor, root: usize) -> Plan<'a> {
        let (len, size) = (tensor.elem_count(), tensor.dtype().size_in_bytes());
        Plan::copying(Memory::of(tensor), self.broadcast_schedule(len, size, root), tensor)
    }

    fn broadcast_schedule(&self, len: usize, size: usize, root: usize) -> Arc<Schedule> {
        let key = ScheduleKey { kind: CallKind::Broadcast, len, size, root };
        self.recent(key, || algorithm::broadcast(self.rank, self.world_size, len, size, root))
    }

    fn all_gather<'a>(&self, output: &'a Tensor, input: &'a Tensor, counts: &Counts) -> Plan<'a> {
        let parts = self.parts(output.elem_count(), counts);
        let (own, first) = (input.elem_count(), parts.of(self.rank).start);
        let schedule = || {
            let gather = algorithm::all_gather(self.rank, &self.topology, &parts).shifted(own);
            Schedule::copying(0..own, own + first).then(gather)
        };
        let memory = Memory::of(input).output(output);
        let key = ScheduleKey { kind: CallKind::AllGather, len: parts.len(), size: 0, root: 0 };
        match counts {
            Some(_) => Plan::copying(memory, schedule(), input),
            None => Plan::copying(memory, self.recent(key, schedule), input),
        }
    }

    fn reduce_scatter<'a>(
        &self,
        output: &'a Tensor,
        input: &'a Tensor,
        op: ReduceOp,
        counts: &Counts,
    ) -> Result<Plan<'a>> {
        let parts = self.parts(input.elem_count(), counts);
        if let Some(plan) = self.halves_reduce_scatter(output, input, op, &parts) {
            return Ok(plan);
        }
        let dtype = widened(input.dtype());
        let size = dtype.size_in_bytes();
        let (schedule, room) = algorithm::reduce_scatter(self.rank, &self.topology, &parts, size);
        let memory = summed(own_input(input)?, output)?.scratch(room * size);
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
        let plan = Plan::copying(Memory::of(input).output(output), schedule, input);
        Plan { pairs: pairs(self.rank, &outgoing, &incoming), ..plan }
    }

    /// Returns the schedule of a call, which `make` makes if it is not known.
    fn recent(&self, key: ScheduleKey, make: impl FnOnce() -> Schedule) -> Arc<Schedule> {
        let mut recent = self.recent.borrow_mut();
        if let Some((_, schedule)) = recent.iter().find(|(known, _)| *known == key) {
            return schedule.clone();
        }
        let schedule = Arc::new(make());
        if schedule.steps.len() <= MOST_STEPS {
            recent.truncate(RECENT - 1);
            recent.push_front((key, schedule.clone()));
        }
        schedule
    }

    /// Returns the parts of `whole` elements: equal ones, unless there are counts.
    fn parts(&self, whole: usize, counts: &Counts) -> Parts {
        match counts {
            Some(counts) => Parts::uneven(counts),
            None => Parts::even(whole, self.world_size),
        }
    }
}

impl<'a> Plan<'a> {
    fn copying(memory: Memory<'a>, schedule: impl Into<Arc<Schedule>>, like: &Tensor) -> Self {
        Self { memory, schedule: schedule.into(), dtype: like.dtype(), op: ReduceOp::Sum, pairs: Vec::new() }
    }

    fn reducing(memory: Memory<'a>, schedule: Schedule, like: &Tensor, op: ReduceOp) -> Self {
        Self { memory, schedule: schedule.into(), dtype: widened(like.dtype()), op, pairs: Vec::new() }
    }
}

/// f16 and bf16 are reduced in f32.
fn widened(dtype: DType) -> DType {
    if storage::is_half(dtype) { DType::F32 } else { dtype }
}

/// Appends a tensor to which reductions are written.
fn summed<'a>(memory: Memory<'a>, tensor: &'a Tensor) -> Result<Memory<'a>> {
    if storage::is_half(tensor.dtype()) { memory.wide(tensor, true) } else { Ok(memory.tensor(tensor)) }
}

/// Returns the memory of a tensor whose elements are reduced, and which is not written to.
fn own_input(tensor: &Tensor) -> Result<Memory<'_>> {
    let memory = Memory::default();
    if storage::is_half(tensor.dtype()) { memory.wide(tensor, false) } else { Ok(memory.tensor(tensor)) }
}

/// Returns a copy of a tensor in which to reduce.
fn own_copy(tensor: &Tensor) -> Result<Memory<'_>> {
    if storage::is_half(tensor.dtype()) { own_input(tensor) } else { Memory::default().copy_of(tensor) }
}

/// Returns, for each peer, a digest of the element counts sent from the lower to the higher rank and back: the same on
/// both ranks.
fn pairs(rank: usize, outgoing: &Parts, incoming: &Parts) -> Vec<u64> {
    let pair = |peer: usize| {
        let (out, back) = (outgoing.of(peer).len(), incoming.of(peer).len());
        fingerprint::digest(if rank < peer { [out, back] } else { [back, out] })
    };
    (0..outgoing.count()).map(pair).collect()
}

#[cfg(test)]
mod tests;
