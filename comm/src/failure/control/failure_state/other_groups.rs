//! Relations between a group and the other groups of its job: calls in progress in other groups, and causes from them.

use std::sync::Arc;

use super::FailureState;
use crate::Error;
use crate::base::cause::{Cause, NO_ANSWER};
use crate::base::lock;
use crate::base::members::Members;
use crate::failure::diagnosis::{Activity, OtherGroupCall, Question};
use crate::failure::supervisor::Supervisor;

impl FailureState {
    /// Returns what this rank is doing, with its calls in other groups of the job.
    pub(crate) fn activity(&self) -> Activity {
        let mut activity = lock(&self.activity).clone();
        let groups = self.job.groups();
        let others = groups.iter().filter(|group| !std::ptr::eq(&***group, self));
        activity.elsewhere = others.filter_map(|group| group.as_seen_by(&self.members)).collect();
        let own = |meeting: Arc<OtherGroupCall>| OtherGroupCall {
            call: meeting.call.clone(),
            waits: meeting.waits.iter().filter_map(|number| self.members.rank_of(*number)).collect(),
        };
        activity.elsewhere.extend(self.job.formations().into_iter().map(own));
        activity.stalled = self.data_connections.stalled_links();
        activity.failed = self.reason_to_leave();
        activity
    }

    /// Returns the call in progress in this group, for another group with these members. `None` if this group has
    /// failed or is closing, since the call then ends as well.
    fn as_seen_by(&self, members: &Members) -> Option<OtherGroupCall> {
        if self.has_failed() || self.closing().is_some() {
            return None;
        }
        let activity = lock(&self.activity);
        let call = activity.current()?.to_string() + &self.members.suffix();
        let waits = activity.waits().filter_map(|rank| members.rank_of(self.members.world_rank(rank)));
        Some(OtherGroupCall { call, waits: waits.collect() })
    }

    /// Records that this rank's program cannot go on, for the goodbyes of all groups of the job.
    pub(crate) fn announce_failure(&self, reason: &str) {
        self.job.announce(Cause::program(self.members.world_rank(self.rank), reason));
    }

    /// Returns the reason that this rank's program has announced, or else the cause for which a group of the job has failed, in
    /// this group's ranks.
    pub(crate) fn reason_to_leave(&self) -> Option<Cause> {
        Some(self.to_own_ranks(self.job.reason_to_leave()?))
    }

    /// Returns the number in the job of the rank that was blamed in one of the job's groups, if that was its first failure.
    pub(crate) fn blamed_in_job(&self) -> Option<usize> {
        self.job.failure()?.blamed()
    }

    /// Converts a cause with ranks of the whole job to ranks of this group. If it concerns no rank of this group, it is
    /// wrapped in [`Cause::InJob`].
    fn to_own_ranks(&self, cause: Cause) -> Cause {
        let known = cause.renumbered(|number| self.members.rank_of(number));
        known.unwrap_or_else(|| {
            let world = self.job.world();
            let host = cause.rank().zip(world).and_then(|(number, world)| {
                let rank = world.members.rank_of(number)?;
                Some(Supervisor::host(&*world, rank))
            });
            Cause::InJob { cause: Box::new(cause), host: host.unwrap_or_default() }
        })
    }

    /// Converts a cause received from a rank of another group in the same way.
    pub(crate) fn converted_from_group(&self, cause: Cause) -> Cause {
        match cause {
            Cause::InJob { cause, .. } => self.to_own_ranks(*cause),
            cause => cause,
        }
        .with_reason(&self.job.failure().map(|known| self.to_own_ranks(known)))
    }

    /// Asks the group of all ranks about the ranks that a question is about. It may have to query all of them.
    pub(super) fn ask_world(&self, question: &Question) -> Option<Cause> {
        let world = self.job.world().filter(|world| !std::ptr::eq(&**world, self))?;
        let (peers, lost) = match question {
            Question::Stuck { peer, last: true, .. } | Question::Suspect { peer } => {
                let waits: Vec<usize> = lock(&self.activity).waits().collect();
                (if waits.contains(peer) { waits } else { vec![*peer] }, false)
            }
            Question::Lost { peer, because: None, .. } | Question::Unreached { peer, .. } => {
                (vec![*peer], true)
            }
            _ => return None,
        };
        let numbers: Vec<usize> = peers.into_iter().map(|rank| self.members.world_rank(rank)).collect();
        self.ask_of(&world, &numbers, lost)
    }

    /// The same for ranks given by their numbers in the job.
    fn ask_of(&self, world: &FailureState, numbers: &[usize], lost: bool) -> Option<Cause> {
        let peers: Vec<usize> = numbers.iter().filter_map(|number| world.members.rank_of(*number)).collect();
        let cause = match world.failure() {
            None if peers.is_empty() => None,
            None => world.ask_here(Question::Elsewhere { peers, lost }),
            known => known,
        };
        match cause? {
            Cause::InJob { cause, .. } => Some(self.to_own_ranks(*cause)),
            cause => cause
                .renumbered(|rank| Some(world.members.world_rank(rank)))
                .map(|cause| self.to_own_ranks(cause)),
        }
    }

    /// Returns the error for a failed attempt of this rank to form a group with `others` of the job. If the group of
    /// all ranks knows the rank that all wait for in the end, the error names that rank.
    pub(crate) fn explain(&self, error: Error, operation: String, others: &[usize]) -> Error {
        let gone = match &error {
            Error::PeerDied { rank, .. } => Some(*rank),
            Error::Rendezvous { .. } | Error::Timeout { .. } => None,
            _ => return error,
        };
        let Some(world) = self.job.world() else { return error };
        let gone_why = gone.and_then(|rank| self.ask_of(&world, &[rank], true));
        let cause = gone_why.or_else(|| self.ask_of(&world, others, false)).filter(|cause| match cause {
            // That these ranks are missing is known already, and `error` says more about it.
            Cause::Stalled { rank, detail } => {
                detail == NO_ANSWER || !others.contains(&self.members.world_rank(*rank))
            }
            _ => true,
        });
        match (cause, error) {
            (Some(cause), _) => {
                self.note_in_job(&cause);
                let host = |rank| Supervisor::host(self, rank);
                cause.to_error(self.rank, operation, self.timeout, &self.members, host)
            }
            // It has closed the connection, but is alive.
            (None, Error::PeerDied { rank, host, operation }) => Error::PeerLeft { rank, host, operation },
            (None, error) => error,
        }
    }

    /// Cancels this rank's attempts to form groups from this one, because the group is closed and the other ranks know.
    pub(crate) fn cancel_formations(&self) {
        self.job.end_meetings(self, true);
    }

    pub(super) fn note_in_job(&self, cause: &Cause) {
        let in_job = match cause {
            Cause::InJob { cause, .. } => Some((**cause).clone()),
            cause => cause.renumbered(|rank| Some(self.members.world_rank(rank))),
        };
        in_job.into_iter().for_each(|cause| self.job.note(cause));
    }
}
