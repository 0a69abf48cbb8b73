//! Operation runner: computes the fingerprint of each operation, plans it, and has the executor run the plan.

mod carried;

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;

use crate::base::buffer::staging::Before;
use crate::base::fingerprint::{self, CallKind, Fingerprint, digest};
use crate::base::members::Members;
use crate::engine::executor::{MessageTransfer, ScheduleExecutor, Task};
use crate::engine::memory::Memory;
use crate::engine::plan::{Plan, Planner};
use crate::failure::shutdown::ShutdownFlag;
use crate::failure::supervisor::Supervisor;
use crate::transport::carrier::Carrier;
use crate::transport::links::Links;
use crate::{Error, Message, Operation, Result, Stats, Topology};

/// Runs operations one after the other, on the calling thread.
pub(crate) trait Run: Send {
    fn run(&mut self, operation: &Operation, before: &Before) -> Result<()>;
    /// Describes the operation as errors would if it were the next one to run.
    fn describe(&self, operation: &Operation) -> String;
    fn stats(&self) -> Stats;
    /// Returns the flags that end the running operation when the communicator ends.
    fn ending(&self) -> Arc<ShutdownFlag>;
}

pub(crate) struct OperationRunner<L> {
    rank: usize,
    planner: Planner,
    executor: ScheduleExecutor<L>,
    carrier: Option<Box<dyn Carrier>>,
    supervisor: Arc<dyn Supervisor>,
    /// Number of collectives so far.
    sequence: u64,
    /// Numbers of point-to-point messages so far, to and from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    stats: Stats,
}

impl<L: Links> OperationRunner<L> {
    pub(crate) fn new(rank: usize, topology: Topology, links: L, supervisor: Arc<dyn Supervisor>) -> Self {
        let world_size = topology.world_size();
        let planner = Planner::new(rank, topology);
        let executor = ScheduleExecutor::new(links, supervisor.clone(), world_size);
        let (sent, received) = (vec![0; world_size], vec![0; world_size]);
        let (carrier, stats) = (None, Stats::default());
        Self { rank, planner, executor, carrier, supervisor, sequence: 0, sent, received, stats }
    }

    /// Sets the carrier, which moves the data of the operations that it accepts.
    pub(crate) fn carried_by(mut self, carrier: Option<Box<dyn Carrier>>) -> Self {
        self.executor.pump(carrier.as_ref().and_then(|carrier| carrier.pump()));
        Self { carrier, ..self }
    }

    fn members(&self) -> &Members {
        self.supervisor.members()
    }

    /// Returns the fingerprint of the next collective.
    fn fingerprint(&self, operation: &Operation) -> Fingerprint {
        let sequence = self.sequence + 1;
        let call = |kind: CallKind, tensor: &Tensor| {
            Fingerprint::new(kind, sequence).tensor(tensor.dtype(), tensor.elem_count())
        };
        // Errors name ranks by their numbers in the whole job.
        let world = |root: &usize| self.members().world_rank(*root);
        match operation {
            Operation::AllReduce { tensor, op } => call(CallKind::AllReduce, tensor).reduce(*op),
            Operation::Reduce { tensor, op, root } => {
                call(CallKind::Reduce, tensor).reduce(*op).root(world(root))
            }
            Operation::Broadcast { tensor, root } => call(CallKind::Broadcast, tensor).root(world(root)),
            Operation::AllGather { input, counts, .. } => {
                with_counts(call(CallKind::AllGather, input), counts)
            }
            Operation::ReduceScatter { output, op, counts, .. } => {
                with_counts(call(CallKind::ReduceScatter, output).reduce(*op), counts)
            }
            Operation::Gather { input, root, counts, .. } => {
                with_counts(call(CallKind::Gather, input).root(world(root)), counts)
            }
            Operation::Scatter { output, root, counts, .. } => {
                with_counts(call(CallKind::Scatter, output).root(world(root)), counts)
            }
            Operation::AllToAll { input, input_counts: None, output_counts: None, .. } => {
                call(CallKind::AllToAll, input)
            }
            // The counts of a pair are known to these two ranks only: see `Plan::pairs`.
            Operation::AllToAll { input, .. } => call(CallKind::AllToAll, input).tensor(input.dtype(), 0),
            Operation::AllReduceCoalesced { tensors, op } => {
                coalesced(Fingerprint::new(CallKind::AllReduce, sequence).reduce(*op), tensors)
            }
            Operation::BroadcastCoalesced { tensors, root } => {
                coalesced(Fingerprint::new(CallKind::Broadcast, sequence).root(world(root)), tensors)
            }
            _ => Fingerprint::new(CallKind::Barrier, sequence),
        }
    }

    /// Returns the fingerprint of the next message to or from a rank.
    fn message(&self, peer: usize, outgoing: bool, tensor: &Tensor) -> Fingerprint {
        let (counters, sender) = if outgoing { (&self.sent, self.rank) } else { (&self.received, peer) };
        let call =
            Fingerprint::new(CallKind::Message, counters[peer] + 1).root(self.members().world_rank(sender));
        call.tensor(tensor.dtype(), tensor.elem_count())
    }

    /// Counts a message to or from a rank, and returns its description.
    fn next_message(
        &mut self,
        peer: usize,
        outgoing: bool,
        tensor: &Tensor,
        start: usize,
    ) -> MessageTransfer {
        let fingerprint = self.message(peer, outgoing, tensor);
        let counters = if outgoing { &mut self.sent } else { &mut self.received };
        counters[peer] += 1;
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        MessageTransfer { peer, outgoing, fingerprint, range: start..start + bytes }
    }

    /// Returns the messages that an operation consists of, and their tensors; `None` for a collective.
    fn messages<'a>(&mut self, operation: &'a Operation) -> Option<(Vec<MessageTransfer>, Memory<'a>)> {
        match operation {
            Operation::Send { tensor, to } => {
                Some((vec![self.next_message(*to, true, tensor, 0)], Memory::of(tensor)))
            }
            Operation::Recv { tensor, from } => {
                Some((vec![self.next_message(*from, false, tensor, 0)], Memory::default().output(tensor)))
            }
            Operation::Batch { messages } => {
                let (mut transfers, mut memory) = (Vec::new(), Memory::default());
                for message in messages {
                    let outgoing = matches!(message, Message::Send { .. });
                    transfers.push(self.next_message(
                        message.peer(),
                        outgoing,
                        message.tensor(),
                        memory.len(),
                    ));
                    memory = match outgoing {
                        true => memory.tensor(message.tensor()),
                        false => memory.output(message.tensor()),
                    };
                }
                Some((transfers, memory))
            }
            _ => None,
        }
    }

    fn execute(&mut self, operation: &Operation, before: &Before) -> Result<()> {
        if self.is_carried(operation) {
            return self.carry(operation, before);
        }
        before.wait()?;
        if let Some((messages, mut memory)) = self.messages(operation) {
            let Some(first) = messages.first() else { return Ok(()) };
            self.supervisor.begin(first.fingerprint);
            let result = self.executor.exchange(messages, &mut memory);
            result.inspect_err(|_| {
                self.supervisor.close_streams(&mut || self.executor.finish_sends(&memory))
            })?;
            return memory.finish();
        }
        let fingerprint = self.fingerprint(operation);
        self.sequence += 1;
        self.supervisor.begin(fingerprint);
        let plan = self.planner.plan(operation)?;
        let Plan { mut memory, schedule, dtype, op, pairs } = plan;
        let task = Task { fingerprint, pairs: &pairs, op, dtype };
        // In the middle of a collective, a failure report would be taken for data, so it is sent to no rank.
        self.executor
            .run(&task, &schedule, &mut memory)
            .inspect_err(|_| self.supervisor.close_streams(&mut Vec::new))?;
        memory.finish()
    }
}

/// For uneven parts, uses the element count of all parts instead of that of one, and adds a digest of the counts.
fn with_counts(call: Fingerprint, counts: &Option<Vec<usize>>) -> Fingerprint {
    match counts {
        None => call,
        Some(counts) => call.elements(counts.iter().sum()).detail(digest(counts.iter().copied())),
    }
}

/// Uses the element count of all tensors, and adds a digest of their dtypes and element counts.
fn coalesced(call: Fingerprint, tensors: &[Tensor]) -> Fingerprint {
    let elements = tensors.iter().map(Tensor::elem_count).sum();
    let sizes =
        tensors.iter().flat_map(|tensor| [fingerprint::dtype_number(tensor.dtype()), tensor.elem_count()]);
    let call = match tensors.first() {
        Some(first) => call.tensor(first.dtype(), elements),
        None => call,
    };
    call.detail(digest(sizes))
}

impl<L: Links> Run for OperationRunner<L> {
    fn run(&mut self, operation: &Operation, before: &Before) -> Result<()> {
        let elements = || -> usize { operation.tensors().iter().map(|tensor| tensor.elem_count()).sum() };
        let span = tracing::info_span!("collective", call = operation.name(), elements = elements());
        let _entered = span.enter();
        let began = Instant::now();
        let result = self.execute(operation, before);
        // An aborted call stays open, so that it does not count as one in which this rank has taken part.
        if !matches!(result, Err(Error::Aborted { .. })) {
            self.supervisor.end();
        }
        self.stats.busy_ns += began.elapsed().as_nanos() as u64;
        self.stats.operations += u64::from(result.is_ok());
        result
    }

    fn describe(&self, operation: &Operation) -> String {
        let carried = self.is_carried(operation);
        let call = match operation {
            Operation::Send { tensor, to } => self.message(*to, true, tensor),
            Operation::Recv { tensor, from } => self.message(*from, false, tensor),
            Operation::Batch { messages } => match messages.first() {
                Some(Message::Send { tensor, to }) => self.message(*to, true, tensor),
                Some(Message::Recv { tensor, from }) => self.message(*from, false, tensor),
                None => return operation.name().into(),
            },
            collective => self.fingerprint(collective),
        };
        if carried { call.carried().to_string() } else { call.to_string() }
    }

    fn stats(&self) -> Stats {
        Stats {
            bytes_sent: self.executor.bytes_sent,
            bytes_received: self.executor.bytes_received,
            waited_ns: self.executor.waited.as_nanos() as u64,
            ..self.stats
        }
    }

    fn ending(&self) -> Arc<ShutdownFlag> {
        self.executor.ending().clone()
    }
}
