//! The part of every other rank that is left.

use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use rustix::event::PollFlags;

use super::super::Own;
use super::super::member::{Leader, hello};
use super::message::{Card, Come, Knock, LIMIT, Reply};
use super::search::{Search, excluded, knock};
use super::{Attempt, Hall, Miss, Regrouped};
use crate::Error;
use crate::tcp::fault::Fault;
use crate::tcp::wire::{Wire, wait_any};

/// A place in a new group.
pub(super) struct Seat {
    rank: usize,
    generation: u64,
    people: Vec<Card>,
}

impl Hall {
    /// Goes to a leader's door, and waits there.
    pub(super) fn follow(
        &self,
        search: &mut Search<'_>,
        leader: usize,
        door: SocketAddr,
    ) -> Attempt<Regrouped> {
        self.go_out();
        let deadline = search.deadline;
        let config = self.config_as(0, 1);
        let plan = self.plan(&config, &[self.card()], Own::new(config.transport), deadline);
        let (listener, port) = plan.listen_for_data()?;
        let (generation, people) = {
            let state = self.state();
            let card = |(number, door): (&usize, &SocketAddr)| Card { number: *number, door: *door };
            (state.generation, state.people.iter().map(card).collect())
        };
        let come = Knock::Come(Come { generation, card: self.card(), people, hello: hello(&plan, port) });
        let until = plan.deadline;
        let own = plan.own;
        let mut wire = knock(door, Some(leader), (&self.credentials, self.own as u32), &come, until)
            .map_err(|fault| Miss::Again(format!("rank {leader} cannot be reached at {door}: {fault}")))?;
        let mut still_there = || {
            search.look(leader, door, search.patience())?;
            Ok(!search.is_given_up(leader))
        };
        match self.await_seat(&mut wire, &format!("rank {leader}"), deadline, &mut still_there)? {
            Some(seat) => self.take_seat(seat, wire, own, listener, deadline),
            None => {
                // It has found a rank that was silent before.
                search.silent.clear();
                Err(Miss::Again(format!("rank {leader} does not lead")))
            }
        }
    }

    /// Waits for a place in the group; none where `leader` does not lead. It is asked now and then whether it is there: its
    /// connection stays open when it is stopped.
    pub(super) fn await_seat(
        &self,
        wire: &mut Wire,
        leader: &str,
        deadline: Instant,
        still_there: &mut dyn FnMut() -> Attempt<bool>,
    ) -> Attempt<Option<Seat>> {
        let mut pause = self.silence() / 4;
        loop {
            let until = deadline.min(Instant::now() + pause);
            let said = wait_any(&[(wire.fd(), PollFlags::IN)], until)
                .map_err(|reason| Error::system("waiting for a new group", reason))?;
            if said[0] || Instant::now() >= deadline {
                break;
            }
            if !still_there()? && !wire.has_news() {
                return Err(Miss::Again(format!("{leader} does not answer any more")));
            }
            pause = (pause * 2).min(self.silence());
        }
        match wire.receive(LIMIT, deadline.min(Instant::now() + self.silence())) {
            Ok(Reply::Seat { rank, generation, people }) if rank > 0 && rank < people.len() => {
                Ok(Some(Seat { rank, generation, people }))
            }
            Ok(Reply::Excluded) => Err(Miss::Final(excluded(self.own))),
            Ok(Reply::Refused(reason)) => {
                let address = wire.peer().map_or_else(|_| leader.into(), |peer| peer.to_string());
                Err(Miss::Final(Error::Refused { rank: self.own, address, reason }))
            }
            Ok(_) => Ok(None),
            Err(Fault::TimedOut) => {
                Err(Miss::Again(format!("{leader} is there, and does not come to meet the others")))
            }
            Err(fault) => Err(Miss::Again(format!("{leader}: {fault}"))),
        }
    }

    /// Meets the others.
    pub(super) fn take_seat(
        &self,
        Seat { rank, generation, people }: Seat,
        wire: Wire,
        own: Own,
        listener: TcpListener,
        deadline: Instant,
    ) -> Attempt<Regrouped> {
        let config = self.config_as(rank, people.len());
        let plan = self.plan(&config, &people, own, deadline);
        let meeting = Leader { plan: &plan, wire }.conclude(listener, &self.credentials)?;
        self.settle(generation, &people)?;
        let numbers = people.iter().map(|card| card.number).collect();
        Ok(Regrouped { config, meeting, numbers })
    }
}
