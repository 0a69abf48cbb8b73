//! The part of the lowest rank that is left.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::super::leader::{Members, conclude, dismiss, into_meeting};
use super::super::roster::{entry, name_ranks};
use super::super::{Own, meet_nobody};
use super::door::Visitor;
use super::message::{Card, Reply};
use super::quorum::may_go_on;
use super::search::{Search, excluded};
use super::{Attempt, Hall, Miss, Regrouped};
use crate::Error;
use crate::tcp::fault::Fault;

/// How often the leader looks who has come and who is gone.
const ROUND: Duration = Duration::from_millis(2);

/// Who takes part in a new group, this rank not counted.
struct Crew {
    /// By their number in the job.
    guests: Vec<Visitor>,
    generation: u64,
}

impl Hall {
    /// Waits for those who are left, and meets with them.
    pub(super) fn lead(&self, search: &mut Search<'_>, room: usize) -> Attempt<Regrouped> {
        self.gather(search)?;
        let Crew { guests, generation } = self.choose(search, room)?;
        let (rank, world_size) = (0, guests.len() + 1);
        let config = self.config_as(rank, world_size);
        let people: Vec<Card> =
            std::iter::once(self.card()).chain(guests.iter().map(|guest| guest.card.clone())).collect();
        let plan = self.plan(&config, &people, Own::new(config.transport), search.deadline);
        let listener = plan.listen_for_data()?;
        let mut members: Members = Vec::new();
        let mut outcome = Ok(());
        for (rank, Visitor { hello, from, mut wire, .. }) in (1..).zip(guests) {
            let seat = Reply::Seat { rank, generation, people: people.clone() };
            let host = hello.host.clone();
            match wire.send(&seat, plan.deadline) {
                Ok(()) => {}
                Err(Fault::Closed) => outcome = outcome.and(Err(plan.died(rank, host))),
                Err(fault) => outcome = outcome.and(Err(plan.failed(fault.to_string()))),
            }
            members.push((rank, wire, entry(hello, from)));
        }
        let met = match world_size {
            1 => outcome.and_then(|()| meet_nobody(&config, plan.members.clone())),
            _ => outcome
                .and_then(|()| conclude(&plan, &mut members, listener, &self.credentials))
                .map(|lines| into_meeting(&plan, lines, std::mem::take(&mut members))),
        };
        let meeting = met.inspect_err(|error| dismiss(&plan, std::mem::take(&mut members), error))?;
        self.settle(generation, &people)?;
        self.send_away_the_excluded();
        let numbers = people.iter().map(|card| card.number).collect();
        Ok(Regrouped { config, meeting, numbers })
    }

    /// Waits until all who may be left are here. Others may be on their way.
    fn gather(&self, search: &mut Search<'_>) -> Attempt<()> {
        loop {
            let missing = self.missing(search);
            let awaited: Vec<_> =
                missing.iter().filter(|(number, _)| !search.is_given_up(*number)).map(|(n, _)| *n).collect();
            if awaited.is_empty() && search.has_looked(&missing) || Instant::now() >= search.last_call {
                return Ok(());
            }
            search.look_for(&missing)?;
            let state = self.state();
            let here = state.guests.len();
            let came = |state: &mut super::State| state.guests.len() == here;
            drop(self.came.wait_timeout_while(state, ROUND, came).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Members of the newest group that have not come, and are not gone as far as is known.
    fn missing(&self, search: &Search<'_>) -> Vec<(usize, SocketAddr)> {
        let mut state = self.state();
        state.guests.retain(|guest| guest.wire.is_open());
        let (_, people) = state.newest();
        let here: BTreeSet<usize> = state.guests.iter().map(|guest| guest.card.number).collect();
        let missing = |number: &usize| *number != self.own && !here.contains(number);
        people.into_iter().filter(|(number, _)| missing(number) && !search.gone.contains(number)).collect()
    }

    /// Who takes part, if they may go on without the others.
    fn choose(&self, search: &Search<'_>, room: usize) -> Attempt<Crew> {
        let mut state = self.state();
        let (generation, people) = state.newest();
        let before: BTreeSet<usize> = people.into_keys().collect();
        if !before.contains(&self.own) {
            return Err(Miss::Final(excluded(self.own)));
        }
        let is_member = |guest: &Visitor| {
            let number = guest.card.number;
            before.contains(&number) && !search.blamed.contains(&number)
        };
        let here: BTreeSet<usize> = state
            .guests
            .iter()
            .filter(|guest| is_member(guest))
            .map(|guest| guest.card.number)
            .chain([self.own])
            .collect();
        if !may_go_on(&before, &here, &search.gone) {
            let missing =
                before.iter().filter(|number| !here.contains(number) && !search.gone.contains(number));
            let missing = name_ranks(&missing.copied().collect::<Vec<_>>());
            let detail = format!(
                "{missing} may still be there and did not come, and those who did are not enough to go on without"
            );
            return match Instant::now() >= search.deadline {
                true => Err(Miss::Final(Error::Regroup {
                    rank: self.own,
                    waited: self.config.bounded_timeout(),
                    detail,
                })),
                false => Err(Miss::Again(detail)),
            };
        }
        let (members, others) =
            std::mem::take(&mut state.guests).into_iter().partition(|guest| is_member(guest));
        (state.guests, _) = (others, ());
        let mut guests: Vec<Visitor> = members;
        let mut newcomers = std::mem::take(&mut state.newcomers);
        newcomers.retain(|guest| guest.wire.is_open());
        let known = |number: &usize| before.contains(number);
        for guest in newcomers {
            let number = guest.card.number;
            let is_new = !known(&number) && guests.iter().all(|other| other.card.number != number);
            match guests.len() + 1 < room && is_new {
                true => guests.push(guest),
                false => state.newcomers.push(guest),
            }
        }
        guests.sort_by_key(|guest| guest.card.number);
        Ok(Crew { guests, generation: generation + 1 })
    }

    fn send_away_the_excluded(&self) {
        let mut state = self.state();
        let known = state.people.keys().copied().collect::<BTreeSet<usize>>();
        let (stay, go) = std::mem::take(&mut state.guests)
            .into_iter()
            .partition(|guest| known.contains(&guest.card.number));
        state.guests = stay;
        drop(state);
        let go: Vec<Visitor> = go;
        go.into_iter().for_each(|guest| guest.send_away(&Reply::Excluded));
    }
}
