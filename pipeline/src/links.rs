//! One-way connections between ranks: a group of two each, so that no message waits for one in another direction.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::thread::Builder;

use candle_core::{DType, Device, Tensor, Var};
use comm::{Communicator, Operation, Stats, Work};
use serde::{Deserialize, Serialize};

use crate::news::News;
use crate::{Action, ActionKind, Error, Result, Table};

/// Receives that wait for their message at a time, on each connection.
const AHEAD: usize = 2;
/// Messages up to so many bytes are received when they are needed: until then they lie in the transport's own buffers, or wait
/// at the sender, and one thread fewer has to wake up.
const SMALL: usize = 32 << 10;
/// More than what a message has beside its numbers.
const HEAD: usize = 64;

/// What goes from a stage to the next one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) dims: Vec<usize>,
    pub(crate) dtype: String,
}

impl Spec {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self { dims: tensor.dims().to_vec(), dtype: tensor.dtype().as_str().into() }
    }

    /// What a stage gives must be what the next one has made room for, in shape and dtype.
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
        self.dims.iter().product::<usize>() * dtype.size_in_bytes() <= SMALL
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

/// All connections of this rank.
pub(crate) struct Links {
    news: Arc<News>,
    outgoing: BTreeMap<usize, Outgoing>,
    incoming: BTreeMap<usize, Incoming>,
    /// Sends of this step, and of the one before.
    sends: [Vec<Work>; 2],
    arrived: HashMap<Action, Var>,
    /// The rank at the other end of each stage's messages.
    owners: Vec<usize>,
    /// What each stage gives.
    specs: Vec<Spec>,
    device: Device,
}

struct Outgoing {
    comm: Arc<dyn Communicator>,
    /// Bytes sent in this step, as long as there is room for them: what a link carries in a step is received before the same
    /// link carries the next step's.
    sent: usize,
    /// More than the transport has room for: messages wait their turn in the background.
    queued: bool,
}

struct Incoming {
    comm: Arc<dyn Communicator>,
    /// What comes in a step, in the order in which it is sent.
    order: Vec<Action>,
    /// How much of it was asked for.
    asked: usize,
    posted: VecDeque<(Action, Var, Work)>,
}

impl Links {
    /// Makes a connection for each pair of ranks between which the table has messages. Every rank must call it.
    pub(crate) fn new(
        world: &dyn Communicator,
        news: Arc<News>,
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
        // The same order everywhere, so that no two ranks wait for each other.
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
        Ok(Self { news, outgoing, incoming, sends, arrived, owners, specs, device: device.clone() })
    }

    /// Asks for the first messages of a step.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.outgoing.values_mut().for_each(|outgoing| outgoing.sent = 0);
        let (specs, device, news) = (&self.specs, &self.device, &self.news);
        self.incoming.values_mut().try_for_each(|incoming| {
            incoming.asked = 0;
            incoming.post(specs, device).map_err(|error| known(news, error))
        })
    }

    /// Sends without waiting.
    pub(crate) fn send(&mut self, action: Action, tensor: &Tensor) -> Result<()> {
        let stage =
            if action.kind == ActionKind::SendActivation { action.stage + 1 } else { action.stage - 1 };
        let Some(outgoing) = self.outgoing.get_mut(&self.owners[stage]) else { return Ok(()) };
        let tensor = tensor.detach().contiguous().map_err(Error::during("sending"))?;
        let sent = match outgoing.send(tensor) {
            Ok(work) => work,
            Err(error) => return Err(self.news.cause(error)),
        };
        self.sends[0].extend(sent);
        Ok(())
    }

    /// Waits for a message, and for those that were sent before it; asks for those that come after.
    pub(crate) fn receive(&mut self, action: Action) -> Result<Var> {
        let from =
            if action.kind == ActionKind::RecvActivation { action.stage - 1 } else { action.stage + 1 };
        let from = self.owners[from];
        loop {
            if let Some(var) = self.arrived.remove(&action) {
                return Ok(var);
            }
            let Some(incoming) = self.incoming.get_mut(&from) else { return Err(never(action)) };
            match incoming.next(&self.specs, &self.device) {
                Ok(Some((next, var))) => self.arrived.insert(next, var),
                Ok(None) => return Err(never(action)),
                Err(error) => return Err(known(&self.news, error)),
            };
        }
    }

    /// What was sent and received between stages. What is still on its way is waited for: its receivers are in the same step.
    pub(crate) fn stats(&self) -> Stats {
        for outgoing in self.outgoing.values() {
            // Nothing, after all that is queued; what has failed is told by those who need it.
            let _ = outgoing.comm.run(Operation::Batch { messages: Vec::new() });
        }
        let outgoing = self.outgoing.values().map(|outgoing| outgoing.comm.stats());
        let incoming = self.incoming.values().map(|incoming| incoming.comm.stats());
        outgoing.chain(incoming).fold(Stats::default(), |sum, stats| sum + stats)
    }

    /// Ends a step: what was sent in the one before has arrived long since.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.sends.swap(0, 1);
        for work in std::mem::take(&mut self.sends[0]) {
            work.wait().map_err(|error| self.news.cause(error))?;
        }
        Ok(())
    }
}

/// A failure of communication, with the reason that the other rank has told.
fn known(news: &News, error: Error) -> Error {
    match error {
        Error::Comm(error) => news.cause(error),
        other => other,
    }
}

fn never(action: Action) -> Error {
    Error::BadTable { reason: format!("{action}: nobody sends it") }
}

impl Outgoing {
    /// Sends at once where the transport has room, else in the background; it never waits for the receiver.
    fn send(&mut self, tensor: Tensor) -> comm::Result<Option<Work>> {
        self.sent += tensor.elem_count() * tensor.dtype().size_in_bytes() + HEAD;
        self.queued |= self.sent > self.comm.eager_bytes();
        match self.queued {
            true => self.comm.send(&tensor, 1).map(Some),
            false => self.comm.run(Operation::Send { tensor, to: 1 }).map(|()| None),
        }
    }
}

/// What a message to this rank is like.
fn spec(specs: &[Spec], action: Action) -> &Spec {
    let stage = if action.kind == ActionKind::RecvActivation { action.stage - 1 } else { action.stage };
    &specs[stage]
}

impl Incoming {
    /// The next message; none where no more comes in this step.
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

    /// Asks for messages that are to arrive while this rank computes.
    fn post(&mut self, specs: &[Spec], device: &Device) -> Result<()> {
        while self.posted.len() < AHEAD && self.asked < self.order.len() {
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
    /// What was sent still arrives, and the receivers hear that no more comes; all connections at the same time, as ranks may
    /// wait for one another. Then what this rank waits for ends as well.
    fn drop(&mut self) {
        if std::thread::panicking() {
            // It has died, and each connection says so when this very thread drops it.
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
                    // Without a thread it is dropped here.
                    let _ = Builder::new().spawn_scoped(scope, move || drop(comm));
                }
            });
        }
    }
}
