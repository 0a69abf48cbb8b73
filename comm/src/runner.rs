//! Runs operations: gives each its fingerprint, and has the executor carry out its plan.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;

use crate::executor::{Executor, Task};
use crate::fingerprint::{Fingerprint, Kind, digest};
use crate::links::Links;
use crate::plan::{Plan, Planner};
use crate::supervisor::Supervisor;
use crate::{Operation, Result, Stats};

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
            Operation::AllGather { input, counts, .. } => divided(call(Kind::AllGather, input), counts),
            Operation::ReduceScatter { output, op, counts, .. } => {
                divided(call(Kind::ReduceScatter, output).reduce(*op), counts)
            }
            Operation::Gather { input, root, counts, .. } => {
                divided(call(Kind::Gather, input).root(*root), counts)
            }
            Operation::Scatter { output, root, counts, .. } => {
                divided(call(Kind::Scatter, output).root(*root), counts)
            }
            // How much goes where, only the two ranks know that it concerns: see `Plan::pairs`.
            Operation::AllToAll { input, .. } => call(Kind::AllToAll, input).tensor(input.dtype(), 0),
            Operation::Barrier | Operation::Send { .. } | Operation::Recv { .. } => {
                Fingerprint::new(Kind::Barrier, self.sequence)
            }
        }
    }

    fn execute(&mut self, operation: &Operation, fingerprint: Fingerprint) -> Result<()> {
        let Plan { mut memory, schedule, dtype, op, pairs } =
            Planner { rank: self.rank, world_size: self.world_size }.plan(operation)?;
        let task = Task { fingerprint, pairs: &pairs, op, dtype };
        self.executor.run(&task, &schedule, &mut memory)?;
        memory.finish()
    }
}

/// The elements of all parts, where they are uneven, in place of those of one.
fn divided(call: Fingerprint, counts: &Option<Vec<usize>>) -> Fingerprint {
    match counts {
        None => call,
        Some(counts) => call.elements(counts.iter().sum()).detail(digest(counts.iter().copied())),
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
