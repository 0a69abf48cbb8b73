//! Regrouping on the leader, the lowest remaining rank.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::super::leader::{Members, connect_group, into_meeting, report_failure};
use super::super::roster::{entry, protocol};
use super::super::{MeetingParams, OwnInfo, meet_alone};
use super::message::{GroupOffer, LIMIT, Promise, RankAddress, Reply};
use super::records::{NewGroup, RegroupRecords, WaitingRank};
use super::search::Search;
use super::{Attempt, RegroupState, Regrouped};
use crate::connection::connect_error::ConnectError;
use crate::connection::wire::HandshakeStream;

/// How often the leader checks who has come and who is gone.
const ROUND: Duration = Duration::from_millis(2);

impl RegroupState {
    /// Waits for the remaining ranks, and forms a group with them.
    pub(super) fn lead(&self, search: &mut Search<'_>, room: usize) -> Attempt<Regrouped> {
        self.gather(search)?;
        let NewGroup { waiting, history } = self.choose(search, room)?;
        let (rank, world_size) = (0, waiting.len() + 1);
        let config = self.config_as(rank, world_size);
        let contacts: Vec<RankAddress> =
            std::iter::once(self.contact()).chain(waiting.iter().map(|peer| peer.contact.clone())).collect();
        let met = history.clone().met();
        let decide = || self.agree(met.clone());
        let plan = self.plan(&config, &contacts, OwnInfo::new(config.transport), search.deadline);
        let plan = MeetingParams { agreed: Some(&decide), ..plan };
        let listener = plan.listen_for_data()?;
        let is_member = |number| contacts.iter().any(|contact| contact.number == number);
        let others = self.state().relevant_ranks(&history, is_member);
        let mut members: Members = Vec::new();
        let mut outcome = Ok(());
        for (rank, WaitingRank { hello, from, mut wire, .. }) in (1..).zip(waiting) {
            let (history, contacts, others) = (history.clone(), contacts.clone(), others.clone());
            let offer = Reply::Offer(GroupOffer { rank, history, contacts, others });
            let host = hello.host.clone();
            match wire.send(&offer, plan.deadline) {
                Ok(()) => {}
                Err(ConnectError::Closed) => outcome = outcome.and(Err(plan.died(rank, host))),
                Err(fault) => outcome = outcome.and(Err(plan.failed(fault.to_string()))),
            }
            members.push((rank, wire, entry(hello, from)));
        }
        let outcome = outcome.and_then(|()| receive_promises(&plan, &mut members, history.newest));
        let met = match world_size {
            1 => outcome.and_then(|()| meet_alone(&config, plan.members.clone())),
            _ => outcome
                .and_then(|()| connect_group(&plan, &mut members, listener, &self.credentials, plan.deadline))
                .map(|lines| into_meeting(&plan, lines, std::mem::take(&mut members))),
        };
        let meeting = met.inspect_err(|error| report_failure(&plan, std::mem::take(&mut members), error))?;
        self.set_group(history.met(), &contacts)?;
        self.send_away_the_excluded();
        let numbers = contacts.iter().map(|contact| contact.number).collect();
        Ok(Regrouped { config, meeting, numbers })
    }

    /// Waits until all members that may be alive have come or are given up, and all missing ranks were probed; at most
    /// until the last call.
    fn gather(&self, search: &mut Search<'_>) -> Attempt<()> {
        loop {
            search.read_launcher_reports();
            let (missing, members) = self.missing();
            let is_over = search.findings.are_complete(&missing, &members);
            if is_over || Instant::now() >= search.last_call {
                return Ok(());
            }
            search.probe_missing(&missing, &members)?;
            let state = self.state();
            let here = state.waiting.len();
            let came = |state: &mut RegroupRecords<HandshakeStream>| state.waiting.len() == here;
            drop(self.came.wait_timeout_while(state, ROUND, came).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Returns the missing ranks, and the members of the newest group.
    fn missing(&self) -> (Vec<(usize, SocketAddr)>, BTreeSet<usize>) {
        let mut state = self.state();
        state.waiting.retain(|peer| peer.wire.is_open());
        state.missing(self.own)
    }

    /// Chooses the members of the new group, if they may go on without the others.
    fn choose(&self, search: &mut Search<'_>, room: usize) -> Attempt<NewGroup<HandshakeStream>> {
        let mut state = self.state();
        state.newcomers.retain(|peer| peer.wire.is_open());
        state.choose(self.own, &mut search.findings, room)
    }

    /// Tells the ranks that wait at this listener why there will be no new group.
    pub(super) fn report_failure(&self, why: &str) {
        let waiting = std::mem::take(&mut self.state().waiting);
        waiting.into_iter().for_each(|peer| peer.send_away(&Reply::Over(why.into())));
    }

    fn send_away_the_excluded(&self) {
        let mut state = self.state();
        let known = state.history.members();
        let (stay, go) = std::mem::take(&mut state.waiting)
            .into_iter()
            .partition(|peer| known.contains(&peer.contact.number));
        state.waiting = stay;
        drop(state);
        let go: Vec<WaitingRank<HandshakeStream>> = go;
        go.into_iter().for_each(|peer| peer.send_away(&Reply::Excluded));
    }
}

/// Waits until all have promised to take part: nobody agrees to the group before that.
fn receive_promises(plan: &MeetingParams<'_>, members: &mut Members, number: u64) -> crate::Result<()> {
    members.iter_mut().try_for_each(|(rank, wire, entry)| match wire.receive(LIMIT, plan.deadline) {
        Ok(Promise { number: promised }) if promised == number => Ok(()),
        Ok(Promise { .. }) => Err(protocol(plan, *rank, entry, "a promise for another group")),
        Err(ConnectError::Closed) => Err(plan.died(*rank, entry.host.as_str())),
        Err(fault) => Err(plan.failed(format!("rank {}: {fault}", plan.number(*rank)))),
    })
}
