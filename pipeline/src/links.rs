//! Links: one-way connections between ranks, each with its own group of two, so that messages in one direction do not wait
//! for those in the other.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::thread::Builder;

use candle_core::{DType, Device, Tensor, Var};
use comm::{Communicator, Operation, Stats, Work};
use serde::{Deserialize, Serialize};

use crate::failure_reports::FailureReports;
use crate::{Action, ActionKind, Error, Result, Table};

/// Receives that are posted ahead on each link.
const POSTED_RECEIVES: usize = 2;
/// Messages of up to this many bytes are received only when they are needed: until then they are in the transport's buffers,
/// or wait at the sender. This saves waking a thread.
const SMALL_MESSAGE_BYTES: usize = 32 << 10;
/// Upper bound of a message's bytes beyond its elements.
const HEADER_BYTES: usize = 64;

/// Shape and dtype of a stage's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) dims: Vec<usize>,
    pub(crate) dtype: String,
}

impl Spec {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self { dims: tensor.dims().to_vec(), dtype: tensor.dtype().as_str().into() }
    }

    /// Checks that a tensor has the shape and dtype that the receiver has allocated for.
    pub(crate) fn check(&self, tensor: &Tensor, action: Action, what: &'static str) -> Result<()> {
        if tensor.dims() == self.dims && tensor.dtype().as_str() == self.dtype {
            return Ok(());
        }
        let Action { stage, micro_batch, .. } = action;
        let (expected, got) = (self.to_string(), Self::of(tensor).to_string());
        Err(Error::ShapeChanged { stage, what, micro_batch, expected, got })
    }

    fn is_small(&self) -> bool {
        let dtype: DType = self.dtype.parse().unwrap_or(DType::F32);
        self.dims.iter().product::<usize>() * dtype.size_in_bytes() <= SMALL_MESSAGE_BYTES
    }

    pub(crate) fn zeros(&self, device: &Device) -> Result<Var> {
        let dtype: DType = self.dtype.parse().unwrap_or(DType::F32);
        Var::zeros(self.dims.as_slice(), dtype, device).map_err(Error::during("a buffer for a message"))
    }
}

impl std::fmt::Display for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.dims)
    }
}

/// All links of this rank.
pub(crate) struct Links {
    failures: Arc<FailureReports>,
    outgoing: BTreeMap<usize, Outgoing>,
    incoming: BTreeMap<usize, Incoming>,
    /// Sends in progress, of this step and of the previous one.
    sends: [Vec<Work>; 2],
    arrived: HashMap<Action, Var>,
    /// The rank of each stage.
    owners: Vec<usize>,
    /// Shape and dtype of each stage's output.
    specs: Vec<Spec>,
    device: Device,
}

struct Outgoing {
    comm: Arc<dyn Communicator>,
    /// Bytes sent in this step. They start from 0 in each step, since everything that a link carries in a step is received
    /// before the same link carries messages of the next one.
    sent: usize,
    /// Whether this step has sent more than the transport can buffer; messages are then sent in the background.
    queued: bool,
}

struct Incoming {
    comm: Arc<dyn Communicator>,
    /// The messages of a step, in the order in which they are sent.
    order: Vec<Action>,
    /// How many of them have been received or posted.
    asked: usize,
    posted: VecDeque<(Action, Var, Work)>,
}

impl Links {
    /// Creates a link for each pair of ranks between which the table has messages. Every rank must call it.
    pub(crate) fn new(
        world: &dyn Communicator,
        failures: Arc<FailureReports>,
        table: &Table,
        specs: Vec<Spec>,
        device: &Device,
    ) -> Result<Self> {
        let mut routes: BTreeMap<(usize, usize), Vec<Action>> = BTreeMap::new();
        for (from, actions) in table.actions.iter().enumerate() {
            for action in actions {
                let (stage, kind) = match action.kind {
                    ActionKind::SendActivation => (action.stage + 1, ActionKind::RecvActivation),
                    ActionKind::SendGradient => (action.stage - 1, ActionKind::RecvGradient),
                    _ => continue,
                };
                let receive = Action { kind, stage, micro_batch: action.micro_batch };
                routes.entry((from, table.owners[stage])).or_default().push(receive);
            }
        }
        let (mut outgoing, mut incoming) = (BTreeMap::new(), BTreeMap::new());
        // The same order on all ranks, so that no two wait for each other.
        for ((from, to), order) in routes {
            if from == world.rank() {
                let comm = world.subgroup(&[from, to])?;
                outgoing.insert(to, Outgoing { comm, sent: 0, queued: false });
            } else if to == world.rank() {
                let comm = world.subgroup(&[from, to])?;
                incoming.insert(from, Incoming { comm, order, asked: 0, posted: VecDeque::new() });
            }
        }
        let (sends, arrived, owners) = (Default::default(), HashMap::new(), table.owners.clone());
        Ok(Self { failures, outgoing, incoming, sends, arrived, owners, specs, device: device.clone() })
    }

    /// Starts a step: posts the first receives.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.outgoing.values_mut().for_each(|outgoing| outgoing.sent = 0);
        let (specs, device, failures) = (&self.specs, &self.device, &self.failures);
        self.incoming.values_mut().try_for_each(|incoming| {
            incoming.asked = 0;
            incoming.post(specs, device).map_err(|error| with_reported_cause(failures, error))
        })
    }

    /// Sends without waiting for the receiver.
    pub(crate) fn send(&mut self, action: Action, tensor: &Tensor) -> Result<()> {
        let stage =
            if action.kind == ActionKind::SendActivation { action.stage + 1 } else { action.stage - 1 };
        let Some(outgoing) = self.outgoing.get_mut(&self.owners[stage]) else { return Ok(()) };
        let tensor = tensor.detach().contiguous().map_err(Error::during("sending"))?;
        let sent = match outgoing.send(tensor) {
            Ok(work) => work,
            Err(error) => return Err(self.failures.cause(error)),
        };
        self.sends[0].extend(sent);
        Ok(())
    }

    /// Waits for a message, and for those sent before it on the same link; posts receives for the following ones.
    pub(crate) fn receive(&mut self, action: Action) -> Result<Var> {
        let from =
            if action.kind == ActionKind::RecvActivation { action.stage - 1 } else { action.stage + 1 };
        let from = self.owners[from];
        loop {
            if let Some(var) = self.arrived.remove(&action) {
                return Ok(var);
            }
            let Some(incoming) = self.incoming.get_mut(&from) else { return Err(never_sent(action)) };
            match incoming.next(&self.specs, &self.device) {
                Ok(Some((next, var))) => self.arrived.insert(next, var),
                Ok(None) => return Err(never_sent(action)),
                Err(error) => return Err(with_reported_cause(&self.failures, error)),
            };
        }
    }

    /// Returns the traffic between stages. Waits for sends in progress: their receivers are in the same step.
    pub(crate) fn stats(&self) -> Stats {
        for outgoing in self.outgoing.values() {
            // An empty operation, which runs after all queued ones. Failures are ignored here: the step that needs the
            // message reports them.
            let _ = outgoing.comm.run(Operation::Batch { messages: Vec::new() });
        }
        let outgoing = self.outgoing.values().map(|outgoing| outgoing.comm.stats());
        let incoming = self.incoming.values().map(|incoming| incoming.comm.stats());
        outgoing.chain(incoming).fold(Stats::default(), |sum, stats| sum + stats)
    }

    /// Ends a step: waits for the sends of the previous step, which have normally arrived by now.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.sends.swap(0, 1);
        for work in std::mem::take(&mut self.sends[0]) {
            work.wait().map_err(|error| self.failures.cause(error))?;
        }
        Ok(())
    }
}

/// Returns a communication failure with the cause that the other rank has reported.
fn with_reported_cause(failures: &FailureReports, error: Error) -> Error {
    match error {
        Error::Comm(error) => failures.cause(error),
        other => other,
    }
}

fn never_sent(action: Action) -> Error {
    Error::BadTable { reason: format!("{action}: nobody sends it") }
}

impl Outgoing {
    /// Sends directly if the transport can buffer the message, otherwise in the background; never waits for the receiver.
    fn send(&mut self, tensor: Tensor) -> comm::Result<Option<Work>> {
        self.sent += tensor.elem_count() * tensor.dtype().size_in_bytes() + HEADER_BYTES;
        self.queued |= self.sent > self.comm.eager_bytes();
        match self.queued {
            true => self.comm.send(&tensor, 1).map(Some),
            false => self.comm.run(Operation::Send { tensor, to: 1 }).map(|()| None),
        }
    }
}

/// Returns the shape and dtype of a message to this rank.
fn spec(specs: &[Spec], action: Action) -> &Spec {
    let stage = if action.kind == ActionKind::RecvActivation { action.stage - 1 } else { action.stage };
    &specs[stage]
}

impl Incoming {
    /// Receives the next message; `None` if there are no more in this step.
    fn next(&mut self, specs: &[Spec], device: &Device) -> Result<Option<(Action, Var)>> {
        if let Some((action, buffer, work)) = self.posted.pop_front() {
            work.wait()?;
            self.post(specs, device)?;
            return Ok(Some((action, buffer)));
        }
        let Some(&action) = self.order.get(self.asked) else { return Ok(None) };
        self.asked += 1;
        let buffer = spec(specs, action).zeros(device)?;
        self.comm.run(Operation::Recv { tensor: buffer.as_tensor().clone(), from: 0 })?;
        self.post(specs, device)?;
        Ok(Some((action, buffer)))
    }

    /// Posts receives for messages that may arrive while this rank computes.
    fn post(&mut self, specs: &[Spec], device: &Device) -> Result<()> {
        while self.posted.len() < POSTED_RECEIVES && self.asked < self.order.len() {
            let action = self.order[self.asked];
            let spec = spec(specs, action);
            if spec.is_small() {
                return Ok(());
            }
            let buffer = spec.zeros(device)?;
            let work = self.comm.recv(buffer.as_tensor(), 0)?;
            self.posted.push_back((action, buffer, work));
            self.asked += 1;
        }
        Ok(())
    }
}

impl Drop for Links {
    /// Closes all links. What was sent still arrives, and the receivers notice that nothing follows; all links at the same
    /// time, since ranks may wait for one another. This also ends this rank's pending receives.
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A panic: each link reports it when this thread drops it.
            return;
        }
        self.sends = Default::default();
        for comms in [
            std::mem::take(&mut self.outgoing)
                .into_values()
                .map(|outgoing| outgoing.comm)
                .collect::<Vec<_>>(),
            std::mem::take(&mut self.incoming).into_values().map(|incoming| incoming.comm).collect(),
        ] {
            std::thread::scope(|scope| {
                for comm in comms {
                    // If no thread can be started, it is dropped here.
                    let _ = Builder::new().spawn_scoped(scope, move || drop(comm));
                }
            });
        }
    }
}
