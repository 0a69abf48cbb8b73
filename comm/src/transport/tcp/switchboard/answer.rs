//! Data connections, the side that is dialed.

use std::time::Instant;

use super::dial::SEEN;
use super::{Line, Switchboard};
use crate::rendezvous::connection::acceptor::Greet;
use crate::rendezvous::connection::fault::{Fault, Try};
use crate::rendezvous::connection::handshake::{Admission, Caller, Credentials, Purpose, Status, Verdict};
use crate::rendezvous::connection::wire::Wire;

impl Greet for Switchboard {
    fn credentials(&self) -> &Credentials {
        &self.setup.credentials
    }

    /// Accepts a connection from a peer to which there is none yet. From then on its deadline is that of the group's
    /// time-out, not `until`.
    fn greet(&self, mut wire: Wire, admission: Admission<'_>, until: Instant) -> Try<()> {
        let (status, number) = self.admit(admission.caller);
        let own = self.setup.own;
        let answer = admission.answer(Verdict { status, rank: own.rank, world_size: own.world_size });
        if status != Status::Admitted {
            wire.write(&answer, until)?;
            self.part_with(&wire);
            return Err(Fault::NotAwaited);
        }
        let (peer, deadline) = (admission.caller.rank as usize, Instant::now() + self.setup.timeout);
        let outcome = self.agree(peer, &mut wire, &answer, deadline);
        if outcome.is_err() {
            self.part_with(&wire);
        }
        match outcome {
            // The peer has read the answer and is bound to this connection: it has given up any other that was admitted,
            // before or after.
            Ok(pair) => self.conclude(peer, |line| !matches!(line, Line::Open { .. }), Ok((wire, pair))),
            Err(fault) => {
                let is_mine = |line: &Line| matches!(line, Line::Answering(latest) if *latest == number);
                self.conclude(peer, is_mine, Err(fault))
            }
        }
    }
}

impl Switchboard {
    fn agree(
        &self,
        peer: usize,
        wire: &mut Wire,
        answer: &[u8],
        deadline: Instant,
    ) -> Try<Option<crate::transport::shm::Pair>> {
        wire.write(answer, deadline)?;
        if wire.read(deadline)? != SEEN {
            return Err(Fault::Malformed("something else than that it has seen the answer".into()));
        }
        self.share(peer, wire, deadline)
    }

    /// Sends the last message, if any, on a connection that is not kept: the peer may already regard it as established.
    fn part_with(&self, wire: &Wire) {
        if let Some(words) = &self.state().parting {
            wire.say(words);
        }
    }

    /// Decides whether a peer that dials is admitted. Returns the status, and the number of its connection where it is.
    fn admit(&self, caller: Caller) -> (Status, u64) {
        let own = self.setup.own;
        let Caller { rank, world_size, purpose } = caller;
        let mut state = self.state();
        let status = match state.lines.get(rank as usize) {
            _ if world_size != own.world_size => Status::OtherWorldSize,
            _ if purpose != Purpose::Data || rank == own.rank => Status::NotAwaited,
            _ if state.closed => Status::Gone,
            None => Status::NotAwaited,
            Some(Line::Open { .. }) => Status::Crossed,
            Some(Line::Dialing) if rank > own.rank => Status::Crossed,
            // A second connection from the same peer means that it has given up the first.
            Some(Line::Idle | Line::Dialing | Line::Answering(_)) => Status::Admitted,
        };
        if status == Status::Admitted {
            state.admitted += 1;
            let number = state.admitted;
            state.lines[rank as usize] = Line::Answering(number);
        }
        (status, state.admitted)
    }
}
