//! Data connections, the side that is dialed.

use std::time::Instant;

use super::dial::ANSWER_RECEIVED;
use super::{ConnectionState, DataConnections};
use crate::rendezvous::connection::acceptor::ConnectionHandler;
use crate::rendezvous::connection::connect_error::{ConnectError, ConnectResult};
use crate::rendezvous::connection::handshake::{
    Admission, ClientClaim, Credentials, Purpose, Status, Verdict,
};
use crate::rendezvous::connection::wire::HandshakeStream;

impl ConnectionHandler for DataConnections {
    fn credentials(&self) -> &Credentials {
        &self.setup.credentials
    }

    /// Accepts a connection from a peer to which there is none yet. From then on its deadline is that of the group's
    /// time-out, not `until`.
    fn serve(
        &self,
        mut wire: HandshakeStream,
        admission: Admission<'_>,
        until: Instant,
    ) -> ConnectResult<()> {
        let (status, number) = self.admit(admission.caller);
        let own = self.setup.own;
        let answer = admission.answer(Verdict { status, rank: own.rank, world_size: own.world_size });
        if status != Status::Admitted {
            wire.write(&answer, until)?;
            self.close_with_last_message(&wire);
            return Err(ConnectError::NotAwaited);
        }
        let (peer, deadline) = (admission.caller.rank as usize, Instant::now() + self.setup.timeout);
        let outcome = self.send_answer_and_share(peer, &mut wire, &answer, deadline);
        if outcome.is_err() {
            self.close_with_last_message(&wire);
        }
        match outcome {
            // The peer has read the answer and is bound to this connection: it has given up any other that was admitted,
            // before or after.
            Ok(pair) => self.finish_attempt(
                peer,
                |line| !matches!(line, ConnectionState::Open { .. }),
                Ok((wire, pair)),
            ),
            Err(fault) => {
                let is_mine = |line: &ConnectionState| matches!(line, ConnectionState::Answering(latest) if *latest == number);
                self.finish_attempt(peer, is_mine, Err(fault))
            }
        }
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

    /// Decides whether a peer that dials is admitted. Returns the status, and the number of its connection where it is.
    fn admit(&self, caller: ClientClaim) -> (Status, u64) {
        let own = self.setup.own;
        let ClientClaim { rank, world_size, purpose } = caller;
        let mut state = self.state();
        let status = match state.lines.get(rank as usize) {
            _ if world_size != own.world_size => Status::OtherWorldSize,
            _ if purpose != Purpose::Data || rank == own.rank => Status::NotAwaited,
            _ if state.closed => Status::Gone,
            None => Status::NotAwaited,
            Some(ConnectionState::Open { .. }) => Status::Crossed,
            Some(ConnectionState::Dialing) if rank > own.rank => Status::Crossed,
            // A second connection from the same peer means that it has given up the first.
            Some(ConnectionState::Idle | ConnectionState::Dialing | ConnectionState::Answering(_)) => {
                Status::Admitted
            }
        };
        if status == Status::Admitted {
            state.admitted += 1;
            let number = state.admitted;
            state.lines[rank as usize] = ConnectionState::Answering(number);
        }
        (status, state.admitted)
    }
}
