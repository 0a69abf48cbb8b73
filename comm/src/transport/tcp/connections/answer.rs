//! Data connections, the side that is dialed.

use std::time::Instant;

use super::dial::ANSWER_RECEIVED;
use super::{ConnectionState, DataConnections, Side};
use crate::connection::acceptor::ConnectionHandler;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{Admission, ClientClaim, Credentials, HandshakeStatus, Purpose, Verdict};
use crate::connection::wire::HandshakeStream;

impl ConnectionHandler for DataConnections {
    fn credentials(&self) -> &Credentials {
        &self.setup.credentials
    }

    /// Accepts a connection from a peer to which there is none yet. From then on its deadline is that of the group's
    /// time-out, not `until`.
    fn serve(&self, mut wire: HandshakeStream, admission: Admission, until: Instant) -> ConnectResult<()> {
        let status = self.admit(admission.caller);
        let own = self.setup.own;
        let answer = admission.answer(Verdict { status, rank: own.rank, world_size: own.world_size });
        if status != HandshakeStatus::Admitted {
            wire.write(&answer, until)?;
            self.close_with_last_message(&wire);
            return Err(ConnectError::NotAwaited);
        }
        let (peer, deadline) = (admission.caller.rank as usize, Instant::now() + self.setup.timeout);
        let outcome = self.send_answer_and_share(peer, &mut wire, &answer, deadline);
        if outcome.is_err() {
            self.close_with_last_message(&wire);
        }
        self.finish_attempt(peer, Side::Answered, outcome.map(|pair| (wire, pair)))
    }
}

impl DataConnections {
    fn send_answer_and_share(
        &self,
        peer: usize,
        wire: &mut HandshakeStream,
        answer: &[u8],
        deadline: Instant,
    ) -> ConnectResult<Option<crate::transport::shm::RingPair>> {
        wire.write(answer, deadline)?;
        if wire.read(deadline)? != ANSWER_RECEIVED {
            return Err(ConnectError::Malformed("something else than that it has seen the answer".into()));
        }
        self.share(peer, wire, deadline)
    }

    /// Sends the last message, if any, on a connection that is not kept: the peer may already regard it as established.
    fn close_with_last_message(&self, wire: &HandshakeStream) {
        if let Some(words) = &self.state().parting {
            wire.try_send(words);
        }
    }

    /// Decides whether a peer that dials is admitted.
    fn admit(&self, caller: ClientClaim) -> HandshakeStatus {
        let own = self.setup.own;
        let ClientClaim { rank, world_size, purpose } = caller;
        let mut state = self.state();
        let status = match state.lines.get(rank as usize) {
            _ if world_size != own.world_size => HandshakeStatus::OtherWorldSize,
            _ if purpose != Purpose::Data || rank == own.rank => HandshakeStatus::NotAwaited,
            _ if state.closed => HandshakeStatus::Gone,
            None => HandshakeStatus::NotAwaited,
            Some(ConnectionState::Open { .. }) => HandshakeStatus::Crossed,
            Some(ConnectionState::Dialing) if rank > own.rank => HandshakeStatus::Crossed,
            // A second attempt of the same peer means that it has given up one of the two.
            Some(ConnectionState::Idle | ConnectionState::Dialing | ConnectionState::Answering(_)) => {
                HandshakeStatus::Admitted
            }
        };
        if status == HandshakeStatus::Admitted {
            let line = &mut state.lines[rank as usize];
            let before = if let ConnectionState::Answering(attempts) = line { *attempts } else { 0 };
            *line = ConnectionState::Answering(before + 1);
        }
        status
    }
}
