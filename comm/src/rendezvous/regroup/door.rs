//! A rank's door: accepts other ranks, and lets them wait for a new group.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::super::machine::BuildInfo;
use super::super::message::{Entry, Hello};
use super::super::roster::entry;
use super::super::{OwnInfo, check_secret, own_host};
use super::history::History;
use super::message::{JoinAttempt, LIMIT, RankAddress, RegroupRequest, Reply};
use super::{RegroupRecords, RegroupState};
use crate::Transport;
use crate::base::lock::lock;
use crate::connection::acceptor::ConnectionHandler;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{Admission, Credentials, HandshakeStatus, Purpose, Verdict};
use crate::connection::wire::HandshakeStream;
use crate::transport::site::Site;

/// Time limit for sending an answer.
const ANSWER: Duration = Duration::from_secs(1);

/// A rank that has come and waits.
#[derive(Debug)]
pub(super) struct WaitingRank {
    pub(super) card: RankAddress,
    pub(super) history: History,
    pub(super) promised: u64,
    pub(super) hello: Hello,
    /// The address from which it came.
    pub(super) from: IpAddr,
    pub(super) wire: HandshakeStream,
}

impl WaitingRank {
    pub(super) fn send_away(mut self, reply: &Reply) {
        if self.wire.send(reply, Instant::now() + ANSWER).is_ok() {
            self.wire.close_gracefully();
        }
    }

    pub(super) fn refuse(self, reason: String) {
        tracing::warn!("refused: {reason}");
        self.send_away(&Reply::Refused(reason));
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

    /// Serves a connection to the door.
    fn serve(
        &self,
        mut wire: HandshakeStream,
        admission: Admission<'_>,
        until: Instant,
    ) -> ConnectResult<()> {
        let status = match admission.caller.purpose {
            Purpose::Door => HandshakeStatus::Admitted,
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
                let reply = if self.excludes(number, generation) { Reply::Excluded } else { Reply::Here };
                wire.send(&reply, until)?;
                wire.close_gracefully();
            }
            RegroupRequest::Come(JoinAttempt { card, history, promised, people, hello }) => {
                wire.detach();
                self.add_member(WaitingRank { card, history, promised, hello, from, wire }, &people);
            }
            RegroupRequest::Join { card, hello } => {
                let is_local = wire.is_local()?;
                wire.detach();
                let (history, promised) = (History::default(), 0);
                let guest = WaitingRank { card, history, promised, hello, from, wire };
                self.add_newcomer(guest, is_local);
            }
        }
        Ok(())
    }
}

impl RegroupState {
    /// Lets a rank wait to become a member, or tells it why it cannot.
    fn add_newcomer(&self, guest: WaitingRank, is_local: bool) {
        let mut state = self.state();
        // A rank that asks again has given up its first request.
        state.newcomers.retain(|other| other.wire.is_open() && other.card != guest.card);
        match self.incompatibility(&state, &guest, is_local) {
            None => state.newcomers.push(guest),
            Some(reason) => {
                drop(state);
                guest.refuse(reason);
            }
        }
    }

    /// Returns why a rank cannot become a member. A misfit that is found only during the meeting would keep the members
    /// from meeting.
    fn incompatibility(&self, state: &RegroupRecords, guest: &WaitingRank, is_local: bool) -> Option<String> {
        let (own, number) = (self.own, guest.card.number);
        let waits = state.newcomers.iter().any(|other| other.card.number == number);
        if number == own || waits || state.has_another(&guest.card) {
            return Some(duplicate_number(number));
        }
        let Entry { address, host, site, .. } = entry(guest.hello.clone(), guest.from);
        let own_host = own_host();
        if let Some(reason) =
            BuildInfo::own().incompatibility((own, &own_host), &guest.hello.machine, (number, &host))
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
        let is_elsewhere = |door: &SocketAddr| !door.ip().is_loopback() && door.ip() != self.door.ip();
        let far = !is_local || state.doors.values().any(is_elsewhere);
        let unseen = state.doors.iter().find(|(_, door)| !is_local && door.ip().is_loopback());
        match unseen {
            _ if far && ip.is_loopback() => Some(format!(
                "rank {number} (host {host}) listens on {ip}, where ranks of other hosts cannot reach it: set \
                 GIRANDOLE_BIND (TcpConfig::bind) to its host's address in your network"
            )),
            Some((member, door)) => Some(format!(
                "rank {member} listens on {}, where rank {number} (host {host}) cannot reach it: set \
                 GIRANDOLE_BIND (TcpConfig::bind) on each host to its address in your network",
                door.ip()
            )),
            None => None,
        }
    }

    /// Returns whether the newest group that this rank has met in has gone on without rank `number`, which knows of no
    /// group newer than `newest`. False as long as this rank does not know who is in the first group.
    fn excludes(&self, number: usize, newest: u64) -> bool {
        let RegroupRecords { history, .. } = &*self.state();
        history.is_known() && newest <= history.met && !history.has_met_with(number)
    }

    fn add_member(&self, guest: WaitingRank, people: &[RankAddress]) {
        if self.excludes(guest.card.number, guest.history.newest) {
            return guest.send_away(&Reply::Excluded);
        }
        let mut state = self.state();
        state.add_addresses(people);
        if state.away {
            drop(state);
            return guest.send_away(&Reply::Elsewhere);
        }
        // A rank that comes again has given up the first time.
        state.guests.retain(|other| other.card.number != guest.card.number);
        state.guests.push(guest);
        drop(state);
        self.came.notify_all();
    }

    /// Marks this rank as away, at another door: ranks that wait at this one must look elsewhere.
    pub(super) fn stop_leading(&self) {
        let mut state = self.state();
        state.away = true;
        let guests = std::mem::take(&mut state.guests);
        drop(state);
        guests.into_iter().for_each(|guest| guest.send_away(&Reply::Elsewhere));
    }

    /// Returns how many ranks wait to become members, as far as this rank knows: they come to the door of the group's
    /// first rank.
    pub(crate) fn waiting(&self) -> usize {
        let mut state = lock(&self.state);
        state.newcomers.retain(|guest| guest.wire.is_open());
        state.newcomers.len()
    }
}
