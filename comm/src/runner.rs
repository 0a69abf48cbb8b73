//! Turns an operation on tensors into a call: its fingerprint, its schedule, and the buffer the schedule works on.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;

use crate::element::Element;
use crate::executor::Executor;
use crate::fingerprint::{Fingerprint, Kind};
use crate::links::Links;
use crate::schedule::{Combine, Schedule, Step, Transfer, part};
use crate::storage::{self, Visitor};
use crate::supervisor::Supervisor;
use crate::{Operation, ReduceOp, Result, Stats, algorithm};

/// Runs operations one after the other, on whatever thread calls it.
pub(crate) trait Run: Send {
    fn run(&mut self, operation: &Operation) -> Result<()>;
    fn stats(&self) -> Stats;
}

pub(crate) struct Runner<L> {
    rank: usize,
    world_size: usize,
    executor: Executor<L>,
    supervisor: Arc<dyn Supervisor>,
    /// Collectives so far.
    sequence: u64,
    /// Messages so far, to and from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    stats: Stats,
}

impl<L: Links> Runner<L> {
    pub(crate) fn new(rank: usize, world_size: usize, links: L, supervisor: Arc<dyn Supervisor>) -> Self {
        let executor = Executor::new(links, supervisor.clone(), world_size);
        let (sent, received) = (vec![0; world_size], vec![0; world_size]);
        Self { rank, world_size, executor, supervisor, sequence: 0, sent, received, stats: Stats::default() }
    }

    fn fingerprint(&mut self, operation: &Operation) -> Fingerprint {
        let message = |counters: &mut Vec<u64>, peer: usize, sender: usize, tensor: &Tensor| {
            counters[peer] += 1;
            let call = Fingerprint::new(Kind::Message, counters[peer]);
            call.root(sender).tensor(tensor.dtype(), tensor.elem_count())
        };
        match operation {
            Operation::Send { tensor, to } => return message(&mut self.sent, *to, self.rank, tensor),
            Operation::Recv { tensor, from } => return message(&mut self.received, *from, *from, tensor),
            _ => self.sequence += 1,
        }
        let call = |kind: Kind, tensor: &Tensor| {
            Fingerprint::new(kind, self.sequence).tensor(tensor.dtype(), tensor.elem_count())
        };
        match operation {
            Operation::AllReduce { tensor, op } => call(Kind::AllReduce, tensor).reduce(*op),
            Operation::Reduce { tensor, op, root } => call(Kind::Reduce, tensor).reduce(*op).root(*root),
            Operation::Broadcast { tensor, root } => call(Kind::Broadcast, tensor).root(*root),
            Operation::AllGather { input, .. } => call(Kind::AllGather, input),
            Operation::ReduceScatter { output, op, .. } => call(Kind::ReduceScatter, output).reduce(*op),
            Operation::Barrier | Operation::Send { .. } | Operation::Recv { .. } => {
                Fingerprint::new(Kind::Barrier, self.sequence)
            }
        }
    }

    fn execute(&mut self, operation: &Operation, fingerprint: Fingerprint) -> Result<()> {
        let (name, rank, world_size) = (operation.name(), self.rank, self.world_size);
        let executor = &mut self.executor;
        match operation {
            Operation::AllReduce { tensor, op } => {
                let segment = executor.segment();
                let work = Scheduled::<_, _, true> {
                    executor,
                    fingerprint,
                    op: *op,
                    schedule: |len, size| algorithm::all_reduce(rank, world_size, len, size, segment),
                    on_copy: false,
                };
                storage::visit(tensor, name, work)
            }
            Operation::Reduce { tensor, op, root } => {
                let schedule = |len, _| algorithm::binomial_reduce::schedule(rank, world_size, len, *root);
                let on_copy = rank != *root;
                storage::visit(
                    tensor,
                    name,
                    Scheduled::<_, _, true> { executor, fingerprint, op: *op, schedule, on_copy },
                )
            }
            Operation::Broadcast { tensor, root } => {
                let schedule = |len, _| algorithm::binomial_broadcast::schedule(rank, world_size, len, *root);
                storage::visit(tensor, name, plain(executor, fingerprint, schedule))
            }
            Operation::AllGather { output, input } => {
                let own = storage::bytes(input, name)?;
                let own_part = part(output.elem_count(), world_size, rank).start;
                storage::visit(output, name, Fill { first: own_part, bytes: &own })?;
                let schedule = |len, _| algorithm::ring_all_gather::schedule(rank, world_size, len);
                storage::visit(output, name, plain(executor, fingerprint, schedule))
            }
            Operation::ReduceScatter { output, input, op } => {
                let sums = input.copy().map_err(|source| storage::tensor_error(name, source))?;
                let schedule = |len, _| algorithm::ring_reduce_scatter::schedule(rank, world_size, len);
                let work =
                    Scheduled::<_, _, true> { executor, fingerprint, op: *op, schedule, on_copy: false };
                storage::visit(&sums, name, work)?;
                let own = part(sums.elem_count(), world_size, rank);
                let own = sums.flatten_all().and_then(|sums| sums.narrow(0, own.start, own.len()));
                let own = storage::bytes(&own.map_err(|source| storage::tensor_error(name, source))?, name)?;
                storage::visit(output, name, Fill { first: 0, bytes: &own })
            }
            Operation::Barrier => {
                let schedule = algorithm::dissemination_barrier::schedule(rank, world_size);
                executor.run(fingerprint, &schedule, ReduceOp::Max, &mut [0u8])
            }
            Operation::Send { tensor, to } => {
                let schedule = |len, _| message(Transfer::Send { to: *to, range: 0..len });
                storage::visit(tensor, name, plain(executor, fingerprint, schedule))
            }
            Operation::Recv { tensor, from } => {
                let schedule = |len, _| {
                    message(Transfer::Recv { from: *from, range: 0..len, combine: Combine::Replace })
                };
                storage::visit(tensor, name, plain(executor, fingerprint, schedule))
            }
        }
    }
}

impl<L: Links> Run for Runner<L> {
    fn run(&mut self, operation: &Operation) -> Result<()> {
        let fingerprint = self.fingerprint(operation);
        let span =
            tracing::info_span!("collective", call = operation.name(), elements = fingerprint.elements);
        let _entered = span.enter();
        let began = Instant::now();
        self.supervisor.begin(fingerprint);
        let result = self.execute(operation, fingerprint);
        self.supervisor.end();
        self.stats.busy_ns += began.elapsed().as_nanos() as u64;
        self.stats.operations += u64::from(result.is_ok());
        result
    }

    fn stats(&self) -> Stats {
        Stats {
            bytes_sent: self.executor.bytes_sent,
            bytes_received: self.executor.bytes_received,
            ..self.stats
        }
    }
}

fn message(transfer: Transfer) -> Schedule {
    Schedule { steps: vec![Step { transfers: vec![transfer], finished: 0..0 }] }
}

/// Runs a schedule on the elements of a tensor, of whatever type.
struct Scheduled<'a, L, S, const WIDEN: bool> {
    executor: &'a mut Executor<L>,
    fingerprint: Fingerprint,
    op: ReduceOp,
    /// From the number of elements and the bytes of each.
    schedule: S,
    /// Leaves the tensor as it is.
    on_copy: bool,
}

/// A call that only copies elements.
fn plain<L, S>(
    executor: &mut Executor<L>,
    fingerprint: Fingerprint,
    schedule: S,
) -> Scheduled<'_, L, S, false> {
    Scheduled { executor, fingerprint, op: ReduceOp::Sum, schedule, on_copy: false }
}

impl<L: Links, S: FnOnce(usize, usize) -> Schedule, const WIDEN: bool> Visitor
    for Scheduled<'_, L, S, WIDEN>
{
    const WIDEN: bool = WIDEN;

    fn visit<T: Element>(self, data: &mut [T]) -> Result<()> {
        let schedule = (self.schedule)(data.len(), size_of::<T>());
        if self.on_copy {
            self.executor.run(self.fingerprint, &schedule, self.op, &mut data.to_vec())
        } else {
            self.executor.run(self.fingerprint, &schedule, self.op, data)
        }
    }
}

/// Overwrites elements from `first` on.
struct Fill<'a> {
    first: usize,
    bytes: &'a [u8],
}

impl Visitor for Fill<'_> {
    const WIDEN: bool = false;

    fn visit<T: Element>(self, data: &mut [T]) -> Result<()> {
        let end = self.first + self.bytes.len() / size_of::<T>();
        bytemuck::cast_slice_mut(&mut data[self.first..end]).copy_from_slice(self.bytes);
        Ok(())
    }
}
