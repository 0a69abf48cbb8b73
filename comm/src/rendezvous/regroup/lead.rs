//! Regrouping on the leader, the lowest remaining rank.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::super::leader::{Members, connect_group, into_meeting, report_failure};
use super::super::roster::{entry, protocol};
use super::super::{MeetingParams, OwnInfo, meet_alone};
use super::knowledge::NextGroup;
use super::message::{LIMIT, Promise, Reply};
use super::records::{NewGroup, RegroupRecords, WaitingRank};
use super::search::Search;
use super::{Attempt, RegroupState, Regrouped};
use crate::connection::connect_error::ConnectError;
use crate::connection::wire::{HandshakeStream, wait_any};

/// How often the leader checks who has come and who is gone.
pub(super) const ROUND: Duration = Duration::from_millis(2);

impl RegroupState {
    /// Waits for the remaining ranks, and forms a group with them.
    pub(super) fn lead(&self, search: &mut Search<'_>, room: usize) -> Attempt<Regrouped> {
        self.gather(search)?;
        let mut group = self.choose(search, room)?;
        let NextGroup { history, contacts } = group.next.clone();
        let (rank, world_size) = (0, contacts.len());
        let config = self.config_as(rank, world_size);
        let met = history.clone().met();
        let decide = || self.agree(met.clone());
        let plan = self.plan(&config, &contacts, OwnInfo::new(config.transport), search.deadline);
        let plan = MeetingParams { agreed: Some(&decide), ..plan };
        let listener = plan.listen_for_data()?;
        let mut members: Members = Vec::new();
        let mut outcome = Ok(());
        let waiting = std::mem::take(&mut group.waiting);
        for (rank, WaitingRank { hello, knows, from, mut wire, .. }) in (1..).zip(waiting) {
            let offer = Reply::Offer(group.offer(rank, knows));
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
            let looked = Instant::now();
            let here = self.state().waiting.len();
            let (missing, members) = self.missing();
            let is_over = search.findings.are_complete(&missing, &members);
            if is_over || Instant::now() >= search.last_call {
                return Ok(());
            }
            let awaited = here + search.findings.awaited(&missing, &members);
            search.probe_missing(&missing, &members)?;
            // A look at many ranks takes its time.
            let pause = ROUND.max(looked.elapsed());
            let few = |state: &mut RegroupRecords<HandshakeStream>| state.waiting.len() < awaited;
            let waited = self.came.wait_timeout_while(self.state(), pause, few);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Returns the missing ranks, and the members of the newest group.
    fn missing(&self) -> (Vec<(usize, SocketAddr)>, BTreeSet<usize>) {
        let mut state = self.state();
        // One call for all: nothing comes from a rank that waits.
        let polled: Vec<_> = state.waiting.iter().map(|peer| (peer.wire.fd(), PollFlags::IN)).collect();
        if let Ok(readable) = wait_any(&polled, Instant::now()) {
            let mut readable = readable.into_iter();
            state.waiting.retain(|peer| readable.next() == Some(false) || peer.wire.is_open());
        }
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
        let known = state.history().members();
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
