//! Resources for shared memory between the ranks of one host.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use super::handover::DescriptorExchange;
use super::region::Region;
use super::ring::{Reader, Writer};
use super::wake_up::WakeUp;
use super::{Name, Token};
use crate::connection::obstacle::Obstacle;

/// One rank's means to share memory: its wake-up, which wakes it whichever rank it waits for.
#[derive(Debug, Clone)]
pub(crate) struct SharedMemory {
    pub(crate) wake_up: Arc<WakeUp>,
}

/// The socket on which this rank exchanges descriptors with another one; open during that exchange.
pub(super) struct ExchangeSocket {
    name: Name,
    handover: DescriptorExchange,
    wake_up: Arc<WakeUp>,
}

/// The memory of one stream.
pub(super) struct StreamMemory(Region);

/// The two streams between two ranks.
#[derive(Debug)]
pub(crate) struct RingPair {
    pub(crate) reader: Reader,
    pub(crate) writer: Writer,
    /// The TCP connection beside the memory has ended, or carries a last message.
    pub(crate) gone: bool,
}

impl SharedMemory {
    /// Fails where the system lacks something that shared memory needs.
    pub(crate) fn open() -> Result<Self, Obstacle> {
        let wake_up = WakeUp::new().map_err(|_| Obstacle::Unsupported)?;
        let host = Self { wake_up: Arc::new(wake_up) };
        host.open_counter().map_err(|_| Obstacle::Unsupported)?;
        Ok(host)
    }

    pub(super) fn open_counter(&self) -> Result<ExchangeSocket, Obstacle> {
        let open = || {
            let mut name = Name::default();
            getrandom::fill(&mut name).ok()?;
            let handover = DescriptorExchange::open(&name).ok()?;
            Some(ExchangeSocket { name, handover, wake_up: self.wake_up.clone() })
        };
        open().ok_or(Obstacle::NotHandedOver)
    }
}

impl ExchangeSocket {
    pub(super) fn name(&self) -> Name {
        self.name
    }

    /// Creates the memory of the stream from another rank, and delivers it to that rank, which listens under the name
    /// `to`.
    pub(super) fn give(
        &mut self,
        to: &Name,
        token: &Token,
        deadline: Instant,
    ) -> Result<StreamMemory, Obstacle> {
        let (region, file) = Region::create(token).map_err(|_| Obstacle::NotHandedOver)?;
        self.handover.send(to, token, [file.as_fd(), self.wake_up.handle()], deadline)?;
        Ok(StreamMemory(region))
    }

    /// Takes the memory of the stream to another rank, which that rank has delivered, and completes the pair.
    pub(super) fn take(
        &mut self,
        inbox: StreamMemory,
        token: &Token,
        deadline: Instant,
    ) -> Result<RingPair, Obstacle> {
        let [file, wake_up] = self.handover.receive(token, deadline)?;
        let outbox = Region::open(&file).ok().filter(|region| region.token() == *token);
        let outbox = outbox.ok_or(Obstacle::NotHandedOver)?;
        let wake_up = Arc::new(WakeUp::of(wake_up));
        let (reader, writer) = (Reader::new(inbox.0, wake_up.clone()), Writer::new(outbox, wake_up));
        Ok(RingPair { reader, writer, gone: false })
    }
}
