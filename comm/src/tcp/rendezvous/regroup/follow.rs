//! The part of every other rank that is left.

use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use super::super::Own;
use super::super::member::{Leader, hello};
use super::message::{Card, Come, Knock, LIMIT, Reply};
use super::search::{Found, excluded, knock};
use super::{Attempt, Hall, Miss, Regrouped};
use crate::tcp::fault::Fault;
use crate::tcp::wire::Wire;

impl Hall {
    /// Goes to a leader's door, and waits there.
    pub(super) fn follow(&self, leader: usize, door: SocketAddr, deadline: Instant) -> Attempt<Regrouped> {
        self.go_out();
        let config = self.config_as(0, 1);
        let plan = self.plan(&config, Own::new(config.transport), deadline);
        let (listener, port) = plan.listen_for_data()?;
        let (generation, people) = {
            let state = self.state();
            let card = |(number, door): (&usize, &SocketAddr)| Card { number: *number, door: *door };
            (state.generation, state.people.iter().map(card).collect())
        };
        let come = Knock::Come(Come { generation, card: self.card(), people, hello: hello(&plan, port) });
        let until = plan.deadline;
        let own = plan.own;
        let found = knock(door, Some(leader), (&self.credentials, self.own as u32), &come, until);
        let Found::Here(wire) = found else {
            return Err(Miss::Again(format!("rank {leader} cannot be reached at {door}")));
        };
        self.take_seat(wire, (leader, own), listener, deadline)
    }

    /// Waits for a place in the group, and meets the others.
    pub(super) fn take_seat(
        &self,
        mut wire: Wire,
        (leader, own): (usize, Own),
        listener: TcpListener,
        deadline: Instant,
    ) -> Attempt<Regrouped> {
        let (rank, generation, people) = match wire.receive(LIMIT, deadline) {
            Ok(Reply::Seat { rank, generation, people }) if rank > 0 && rank < people.len() => {
                (rank, generation, people)
            }
            Ok(Reply::Excluded) => return Err(Miss::Final(excluded(self.own))),
            Ok(_) => return Err(Miss::Again(format!("rank {leader} does not lead"))),
            Err(Fault::TimedOut) => {
                return Err(Miss::Again(format!(
                    "rank {leader} is there, and does not come to meet the others"
                )));
            }
            Err(fault) => return Err(Miss::Again(format!("rank {leader}: {fault}"))),
        };
        let config = self.config_as(rank, people.len());
        let plan = self.plan(&config, own, deadline);
        let meeting = Leader { plan: &plan, wire }.conclude(listener, &self.credentials)?;
        self.settle(generation, &people)?;
        let numbers = people.iter().map(|card| card.number).collect();
        Ok(Regrouped { config, meeting, numbers })
    }
}
