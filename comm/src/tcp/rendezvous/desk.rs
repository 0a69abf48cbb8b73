//! Where a rank takes the data connections of the higher ranks.

use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::tcp::fault::{Fault, Try};
use crate::tcp::handshake::{Caller, Credentials, Purpose, Status, Verdict};
use crate::tcp::wire::Wire;

/// The data connections that have come so far.
pub(super) struct Desk {
    own: Caller,
    credentials: Credentials,
    wires: Mutex<Vec<Option<Wire>>>,
}

impl Desk {
    pub(super) fn new(own: Caller, credentials: Credentials) -> Self {
        let wires = Mutex::new((0..own.world_size).map(|_| None).collect());
        Self { own, credentials, wires }
    }

    fn wires(&self) -> MutexGuard<'_, Vec<Option<Wire>>> {
        self.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection, if it is one that is still awaited.
    pub(super) fn greet(&self, mut wire: Wire, deadline: Instant) -> Try<()> {
        let admission = wire.accept(&self.credentials, deadline)?;
        let Caller { rank, world_size, purpose } = admission.caller;
        // The place is given away and the answer sent under one lock: of two connections of one rank, which can be
        // when the first took too long, only that which is told so counts.
        let mut wires = self.wires();
        let taken = wires.get(rank as usize).is_none_or(|held| held.as_ref().is_some_and(Wire::is_open));
        let status = match () {
            () if world_size != self.own.world_size => Status::OtherWorldSize,
            () if purpose != Purpose::Data || rank <= self.own.rank || taken => Status::NotAwaited,
            () => Status::Admitted,
        };
        let verdict = Verdict { status, rank: self.own.rank, world_size: self.own.world_size };
        wire.write(&admission.answer(verdict), deadline)?;
        match (status, wires.get_mut(rank as usize)) {
            (Status::Admitted, Some(place)) => {
                wire.detach();
                *place = Some(wire);
                Ok(())
            }
            _ => Err(Fault::NotAwaited),
        }
    }

    /// Adds a connection that this rank made.
    pub(super) fn keep(&self, rank: usize, wire: Wire) {
        if let Some(place) = self.wires().get_mut(rank) {
            *place = Some(wire);
        }
    }

    /// All connections, by rank.
    pub(super) fn take(&self) -> Try<Vec<Option<TcpStream>>> {
        let wires = std::mem::take(&mut *self.wires());
        let own = self.own.rank as usize;
        if wires.iter().enumerate().any(|(rank, wire)| wire.is_none() && rank != own) {
            return Err(Fault::Malformed("word that all ranks are connected, which they are not".into()));
        }
        wires.into_iter().map(|wire| wire.map(Wire::into_stream).transpose()).collect()
    }
}
