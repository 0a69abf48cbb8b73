//! What a rank shares with the other ranks of its host, on Linux.

use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest, Sha256};

use crate::links::Links;
use crate::tcp::TcpLinks;

use super::bell::Bell;
use super::handover::Handover;
use super::links::HybridLinks;
use super::obstacle::Obstacle;
use super::region::Region;
use super::ring::{Reader, Writer};
use super::{Name, Token};

/// One kernel's boot: two ranks that see the same one run on the same machine, whatever they call it.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// One rank's means to share memory.
pub(super) struct Host {
    name: Name,
    handover: Handover,
    bell: Bell,
}

/// The memory of one stream.
pub(super) struct Inbox(Region);

/// The two streams between two ranks.
pub(super) struct Pair {
    pub(super) reader: Reader,
    pub(super) writer: Writer,
    /// The connection beside the memory has ended.
    pub(super) gone: bool,
}

/// By rank, those with which memory is shared; and this rank's own bell.
pub(crate) struct Pairs {
    pub(super) pairs: Vec<Option<Pair>>,
    pub(super) bell: Bell,
}

impl Host {
    pub(super) fn open() -> Result<Self, Obstacle> {
        let open = || {
            let mut name = Name::default();
            getrandom::fill(&mut name).ok()?;
            let (handover, bell) = (Handover::open(&name).ok()?, Bell::new().ok()?);
            Some(Self { name, handover, bell })
        };
        open().ok_or(Obstacle::Unsupported)
    }

    /// What is the same for all ranks of this host, and for no others.
    pub(super) fn boot() -> Option<Token> {
        Some(Sha256::digest(fs::read(BOOT_ID).ok()?).into())
    }

    pub(super) fn name(&self) -> Name {
        self.name
    }

    /// Makes the memory of the stream from another rank and gives it to that rank, whose socket has this name.
    pub(super) fn give(&mut self, to: &Name, token: &Token, deadline: Instant) -> Result<Inbox, Obstacle> {
        let (region, file) = Region::create(token).map_err(|_| Obstacle::NotHandedOver)?;
        self.handover.give(to, token, [file.as_fd(), self.bell.fd()], deadline)?;
        Ok(Inbox(region))
    }

    /// Takes the memory of the stream to another rank, which has given it, and completes the pair.
    pub(super) fn take(&mut self, inbox: Inbox, token: &Token, deadline: Instant) -> Result<Pair, Obstacle> {
        let [file, bell] = self.handover.take(token, deadline)?;
        let outbox = Region::open(&file).ok().filter(|region| region.token() == *token);
        let outbox = outbox.ok_or(Obstacle::NotHandedOver)?;
        let bell = Arc::new(Bell::of(bell));
        let (reader, writer) = (Reader::new(inbox.0, bell.clone()), Writer::new(outbox, bell));
        Ok(Pair { reader, writer, gone: false })
    }

    pub(super) fn into_pairs(self, pairs: Vec<Option<Pair>>) -> Pairs {
        Pairs { pairs, bell: self.bell }
    }
}

impl Pairs {
    pub(crate) fn ranks(&self) -> Vec<usize> {
        self.pairs.iter().enumerate().filter_map(|(rank, pair)| pair.as_ref().map(|_| rank)).collect()
    }
}

/// Streams to all ranks: through memory where it is shared, through the sockets to all others. `crowded`: there are more
/// ranks than cores.
pub(crate) fn join(sockets: TcpLinks, pairs: Pairs, crowded: bool) -> impl Links {
    HybridLinks::new(sockets, pairs, crowded)
}
