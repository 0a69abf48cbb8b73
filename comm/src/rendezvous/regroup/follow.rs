//! Regrouping on all remaining ranks but the leader.

use std::net::SocketAddr;
use std::time::Instant;

use rustix::event::PollFlags;

use super::super::data_port::DataPort;
use super::super::member::{Leader, hello};
use super::super::{MeetingParams, OwnInfo};
use super::knowledge::NextGroup;
use super::message::{GroupOffer, LIMIT, Promise, RegroupRequest, Reply};
use super::search::{Search, connect};
use super::{Attempt, AttemptError, RegroupState, Regrouped, excluded};
use crate::Error;
use crate::connection::connect_error::ConnectError;
use crate::connection::wire::{HandshakeStream, wait_any};

impl RegroupState {
    /// Goes to a leader's listener, waits there for an offer, and joins the new group.
    pub(super) fn follow(
        &self,
        search: &mut Search<'_>,
        leader: usize,
        address: SocketAddr,
    ) -> Attempt<Regrouped> {
        self.stop_leading();
        let deadline = search.deadline;
        let config = self.config_as(0, 1);
        let plan = self.plan(&config, &[self.contact()], OwnInfo::new(config.transport), deadline);
        let port = plan.reserve_data_port()?;
        let hello = hello(&plan, port.number());
        let come = RegroupRequest::Come(self.state().join_attempt(self.contact(), hello));
        let until = plan.deadline;
        let own = plan.own;
        let mut wire = connect(address, Some(leader), (&self.credentials, self.own as u32), &come, until)
            .map_err(|fault| {
                AttemptError::Again(format!("rank {leader} cannot be reached at {address}: {fault}"))
            })?;
        let mut still_there = || {
            search.look(leader, address, search.answer_deadline())?;
            Ok(!search.findings.is_given_up(leader))
        };
        match self.await_offer(&mut wire, &format!("rank {leader}"), deadline, &mut still_there)? {
            Some(offer) => self.accept_offer(offer, wire, own, port, deadline),
            None => {
                // It has found a rank that was unresponsive before.
                search.findings.silent.clear();
                Err(AttemptError::Again(format!("rank {leader} does not lead")))
            }
        }
    }

    /// Waits for an offer in the new group; returns `None` where `leader` does not lead. The leader is probed now and then,
    /// since the connection to a stopped process stays open.
    pub(super) fn await_offer(
        &self,
        wire: &mut HandshakeStream,
        leader: &str,
        deadline: Instant,
        still_there: &mut dyn FnMut() -> Attempt<bool>,
    ) -> Attempt<Option<GroupOffer>> {
        loop {
            self.await_reply(wire, leader, deadline, still_there)?;
            // At the deadline the leader, which may have begun a little later, is about to report why there is no group.
            return match wire.receive(LIMIT, Instant::now() + self.silence()) {
                Ok(Reply::Tell) => {
                    let knowledge = self.state().knowledge();
                    wire.send(&knowledge, Instant::now() + self.silence())
                        .map_err(|fault| AttemptError::Again(format!("{leader}: {fault}")))?;
                    continue;
                }
                Ok(Reply::Offer(offer)) => Ok(Some(offer)),
                Ok(Reply::Excluded) => Err(AttemptError::Final(excluded(self.own))),
                Ok(Reply::Refused(reason)) => {
                    let address = wire.peer().map_or_else(|_| leader.into(), |peer| peer.to_string());
                    Err(AttemptError::Final(Error::Refused { rank: self.own, address, reason }))
                }
                Ok(Reply::Over(detail)) => {
                    let waited = self.config.bounded_timeout();
                    Err(AttemptError::Final(Error::Regroup { rank: self.own, waited, detail }))
                }
                Ok(Reply::Here | Reply::Elsewhere) => Ok(None),
                Err(ConnectError::TimedOut) => Err(AttemptError::Again(format!(
                    "{leader} is there, and does not come to meet the others"
                ))),
                Err(fault) => Err(AttemptError::Again(format!("{leader}: {fault}"))),
            };
        }
    }

    /// Waits for a message of the leader, which is probed now and then.
    fn await_reply(
        &self,
        wire: &HandshakeStream,
        leader: &str,
        deadline: Instant,
        still_there: &mut dyn FnMut() -> Attempt<bool>,
    ) -> Attempt<()> {
        let mut pause = self.silence() / 4;
        loop {
            let until = deadline.min(Instant::now() + pause);
            let readable = wait_any(&[(wire.fd(), PollFlags::IN)], until)
                .map_err(|reason| Error::system("waiting for a new group", reason))?;
            if readable[0] || Instant::now() >= deadline {
                return Ok(());
            }
            if !still_there()? && !wire.is_readable() {
                return Err(AttemptError::Again(format!("{leader} does not answer any more")));
            }
            pause = (pause * 2).min(self.silence());
        }
    }

    /// Promises to take part, and meets the others.
    pub(super) fn accept_offer(
        &self,
        offer: GroupOffer,
        mut wire: HandshakeStream,
        own: OwnInfo,
        port: DataPort,
        deadline: Instant,
    ) -> Attempt<Regrouped> {
        let rank = offer.rank;
        let NextGroup { history, contacts } = self.state().promise(self.own, offer)?;
        let number = history.newest;
        let config = self.config_as(rank, contacts.len());
        let agree = || self.agree(history.clone());
        let plan = MeetingParams { agreed: Some(&agree), ..self.plan(&config, &contacts, own, deadline) };
        // The others connect once all have promised.
        let listener = port.listen()?;
        wire.send(&Promise { number }, plan.deadline)
            .map_err(|fault| AttemptError::Again(format!("the leader of a new group: {fault}")))?;
        let meeting = Leader { plan: &plan, wire }.conclude(listener, &self.credentials)?;
        self.set_group(history.clone().met(), &contacts)?;
        let numbers = contacts.iter().map(|contact| contact.number).collect();
        Ok(Regrouped { config, meeting, numbers })
    }
}
