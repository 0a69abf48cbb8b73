//! The exchange of keys, values and their gradients between two ranks.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use comm::{Communicator, Message, Operation, Work};
use ops::{PendingExchange, RowExchange};

#[derive(Debug)]
pub(crate) struct Exchange {
    comm: Arc<dyn Communicator>,
}

impl Exchange {
    pub(crate) fn new(comm: Arc<dyn Communicator>) -> Self {
        Self { comm }
    }

    pub(crate) fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }
}

impl RowExchange for Exchange {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn begin(
        &self,
        (to, outgoing): (usize, Vec<Tensor>),
        (from, incoming): (usize, Vec<Tensor>),
    ) -> Result<Box<dyn PendingExchange>> {
        let sent = outgoing.into_iter().map(|tensor| Message::Send { tensor, to });
        let received = incoming.into_iter().map(|tensor| Message::Recv { tensor, from });
        let messages: Vec<Message> = sent.chain(received).collect();
        let work = match messages.is_empty() {
            true => None,
            false => Some(self.comm.submit(Operation::Batch { messages }).map_err(comm::carry)?),
        };
        Ok(Box::new(Pending(work)))
    }
}

struct Pending(Option<Work>);

impl PendingExchange for Pending {
    fn wait(self: Box<Self>) -> Result<()> {
        self.0.map_or(Ok(()), |work| work.wait().map_err(comm::carry))
    }
}
