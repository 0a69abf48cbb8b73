//! A rank's listener: accepts other ranks, and lets them wait for a new group.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::machine::BuildInfo;
use super::super::message::Entry;
use super::super::roster::entry;
use super::super::{OwnInfo, check_secret, own_host};
use super::RegroupState;
use super::history::History;
use super::knowledge::Knowledge;
use super::message::{JoinAttempt, LIMIT, RegroupRequest, Reply};
use super::records::{RegroupRecords, WaitingRank};
use crate::Transport;
use crate::base::lock;
use crate::connection::acceptor::ConnectionHandler;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{Admission, Credentials, HandshakeStatus, Purpose, Verdict};
use crate::connection::wire::HandshakeStream;
use crate::transport::site::Site;

/// Time limit for sending an answer.
const ANSWER: Duration = Duration::from_secs(1);

impl WaitingRank<HandshakeStream> {
    pub(super) fn send_away(self, reply: &Reply) {
        send_away(self.wire, reply);
    }

    pub(super) fn refuse(self, reason: String) {
        tracing::warn!("refused: {reason}");
        self.send_away(&Reply::Refused(reason));
    }
}

/// Returns a rank that has come and is to wait.
pub(super) fn waiting_rank<C>(
    attempt: JoinAttempt,
    history: Arc<History>,
    from: IpAddr,
    wire: C,
) -> WaitingRank<C> {
    let JoinAttempt { contact, knows, newest: _, ended, promised, hello } = attempt;
    WaitingRank { contact, history, knows: Some(knows), ended, promised, hello, from, wire }
}

fn send_away(mut wire: HandshakeStream, reply: &Reply) {
    if wire.send(reply, Instant::now() + ANSWER).is_ok() {
        wire.close_gracefully();
    }
}

/// Returns why a rank with this number cannot become a member.
pub(super) fn duplicate_number(number: usize) -> String {
    format!("there is a rank {number} already: give it a number (RANK) that no rank of the job has had")
}

impl ConnectionHandler for RegroupState {
    fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Serves a connection to the listener.
    fn serve(&self, mut wire: HandshakeStream, admission: Admission, until: Instant) -> ConnectResult<()> {
        let status = match admission.caller.purpose {
            Purpose::Regroup => HandshakeStatus::Admitted,
            _ => HandshakeStatus::NotAwaited,
        };
        let verdict = Verdict { status, rank: self.own as u32, world_size: 0 };
        wire.write(&admission.answer(verdict), until)?;
        if status != HandshakeStatus::Admitted {
            return Err(ConnectError::NotAwaited);
        }
        let from = wire.peer()?.ip().to_canonical();
        match wire.receive(LIMIT, until)? {
            RegroupRequest::Probe { number, generation } => {
                let reply =
                    if self.state().excludes(number, generation) { Reply::Excluded } else { Reply::Here };
                wire.send(&reply, until)?;
                wire.close_gracefully();
            }
            RegroupRequest::Come(attempt) => self.add_member(wire, attempt, from, until)?,
            RegroupRequest::Join { contact, hello } => {
                let is_local = wire.is_local()?;
                wire.detach();
                let (history, knows, ended, promised) = (Arc::default(), None, BTreeSet::new(), 0);
                let peer = WaitingRank { contact, history, knows, ended, promised, hello, from, wire };
                self.add_newcomer(peer, is_local);
            }
        }
        Ok(())
    }
}

impl RegroupState {
    /// Lets a rank wait to become a member, or tells it why it cannot.
    fn add_newcomer(&self, peer: WaitingRank<HandshakeStream>, is_local: bool) {
        let mut state = self.state();
        // This rank is in no group yet itself. The file is of one that has ended, and whose port is this rank's now.
        if !state.history().is_known() {
            drop(state);
            return peer.send_away(&Reply::Elsewhere);
        }
        // A rank that asks again has given up its first request.
        state.newcomers.retain(|other| other.wire.is_open() && other.contact != peer.contact);
        match self.incompatibility(&state, &peer, is_local) {
            None => state.newcomers.push(peer),
            Some(reason) => {
                drop(state);
                peer.refuse(reason);
            }
        }
    }

    /// Returns why a rank cannot become a member. A misfit that is found only during the meeting would keep the members
    /// from meeting.
    fn incompatibility(
        &self,
        state: &RegroupRecords<HandshakeStream>,
        peer: &WaitingRank<HandshakeStream>,
        is_local: bool,
    ) -> Option<String> {
        let (own, number) = (self.own, peer.contact.number);
        let waits = state.newcomers.iter().any(|other| other.contact.number == number);
        if number == own || waits || state.has_another(&peer.contact) {
            return Some(duplicate_number(number));
        }
        let Entry { address, host, site, .. } = entry(peer.hello.clone(), peer.from);
        let own_host = own_host();
        if let Some(reason) =
            BuildInfo::own().incompatibility((own, &own_host), &peer.hello.machine, (number, &host))
        {
            return Some(reason);
        }
        let ip = address.ip();
        if let Err(error) = check_secret(&self.config, ip) {
            return Some(error.to_string());
        }
        if self.config.transport == Transport::Shm {
            let memory = OwnInfo::new(Transport::Shm).memory;
            let here = Site::own(memory.as_ref().err().copied());
            if let Some(obstacle) = here.obstacle_to(&site) {
                return Some(format!(
                    "rank {own} and rank {number} (host {host}) cannot share memory, because {obstacle}, and \
                     the group's transport is shm"
                ));
            }
        }
        let is_elsewhere =
            |address: &SocketAddr| !address.ip().is_loopback() && address.ip() != self.address.ip();
        let far = !is_local || state.addresses().values().any(is_elsewhere);
        let unseen = state.addresses().iter().find(|(_, address)| !is_local && address.ip().is_loopback());
        match unseen {
            _ if far && ip.is_loopback() => Some(format!(
                "rank {number} (host {host}) listens on {ip}, where ranks of other hosts cannot reach it: set \
                 GIRANDOLE_BIND (TcpConfig::bind) to its host's address in your network"
            )),
            Some((member, address)) => Some(format!(
                "rank {member} listens on {}, where rank {number} (host {host}) cannot reach it: set \
                 GIRANDOLE_BIND (TcpConfig::bind) on each host to its address in your network",
                address.ip()
            )),
            None => None,
        }
    }

    /// Lets a member wait for the next group, or tells it why it cannot. Asks it for what it knows where that differs from what this
    /// rank and those that wait know.
    fn add_member(
        &self,
        mut wire: HandshakeStream,
        attempt: JoinAttempt,
        from: IpAddr,
        until: Instant,
    ) -> ConnectResult<()> {
        let (number, newest) = (attempt.contact.number, attempt.newest);
        let (away, known) = {
            let mut state = self.state();
            (state.sends_away(number, newest), state.history_of(attempt.knows))
        };
        let history = match (away, known) {
            (Some(reply), _) => {
                wire.detach();
                send_away(wire, &reply);
                return Ok(());
            }
            (None, Some(history)) => history,
            (None, None) => {
                wire.send(&Reply::Tell, until)?;
                let Knowledge { history, contacts } = wire.receive(LIMIT, until)?;
                self.state().add_addresses(&contacts);
                Arc::new(history)
            }
        };
        wire.detach();
        let mut state = self.state();
        match state.sends_away(number, history.newest) {
            Some(reply) => {
                drop(state);
                send_away(wire, &reply);
            }
            None => {
                state.add_waiting(waiting_rank(attempt, history, from, wire));
                drop(state);
                self.came.notify_all();
            }
        }
        Ok(())
    }

    /// Marks this rank as away, at another listener: ranks that wait at this one must look elsewhere.
    pub(super) fn stop_leading(&self) {
        let mut state = self.state();
        state.away = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|peer| peer.send_away(&Reply::Elsewhere));
    }

    /// Returns how many ranks wait to become members, as far as this rank knows: they come to the listener of the group's
    /// first rank.
    pub(crate) fn waiting(&self) -> usize {
        let mut state = lock(&self.state);
        state.newcomers.retain(|peer| peer.wire.is_open());
        state.newcomers.len()
    }
}
