//! Lost ranks of an elastic job, and whether the others continue.

use std::collections::VecDeque;

use super::{RoundPhase, Supervisor};
use crate::failure::Ended;
use crate::message::NodeMessage;
use crate::start::Worker;

impl Supervisor<'_> {
    /// In an elastic job: enters or leaves [`RoundPhase::Finishing`], depending on whether only ranks outside the group
    /// still run.
    pub(super) fn look_who_is_left(&mut self) {
        let Some(elastic) = &self.config.elastic else { return };
        if self.are_too_few(elastic.min) {
            return;
        }
        let some_run = self.workers.running() > 0 && self.ended_well() > 0;
        let only_apart = some_run && self.workers.running_workers().all(Worker::is_outside_group);
        match (self.phase, only_apart) {
            (RoundPhase::Running, true) => self.enter(RoundPhase::Finishing, elastic.finish),
            (RoundPhase::Finishing, false) => (self.phase, self.deadline) = (RoundPhase::Running, None),
            _ => {}
        }
    }

    /// Ends the job if too few ranks are left, and returns true then. Failed ranks may have counted as lost while
    /// excluded ranks were still counted as members. On several nodes the coordinator checks this.
    fn are_too_few(&mut self, min: usize) -> bool {
        let left = self.workers.at_work() + self.ended_well();
        // A rank that was left behind may have ended: then it is replaced as soon as its end is heard.
        let are_enough = left > 0 && left + self.workers.joining() + self.next_replacement() >= min;
        if are_enough || self.phase != RoundPhase::Running || self.config.nodes > 1 {
            return false;
        }
        let Some(last) = self.lost.pop() else { return false };
        self.count_recent_losses();
        self.ended.push(last);
        self.enter(RoundPhase::Grace, self.config.failure_grace);
        true
    }

    fn ended_well(&self) -> usize {
        self.ended.iter().filter(|end| end.status.success()).count()
    }

    /// Adds the ranks lost within the grace period to the failures: one of them may be the first cause of the job's
    /// end.
    pub(super) fn count_recent_losses(&mut self) {
        let recent = |lost: &Ended| lost.at.elapsed() < self.config.failure_grace;
        self.ended.extend(self.lost.iter().copied().filter(recent));
    }

    /// Called when a rank reports, after others have failed, that the ranks have formed a group. The failed ranks were
    /// members, as without them no group would have formed. So they count as lost, and the others continue if enough
    /// are left.
    pub(super) fn recover_first_failures(&mut self) {
        if self.phase != RoundPhase::Grace {
            return;
        }
        (self.phase, self.deadline) = (RoundPhase::Running, None);
        let (failed, well) =
            std::mem::take(&mut self.ended).into_iter().partition(|end| !end.status.success());
        self.ended = well;
        let failed: Vec<Ended> = failed;
        for end in failed {
            // The coordinator has this loss already.
            if self.lost.iter().any(|lost| lost.rank == end.rank) {
                continue;
            }
            if !self.goes_on_without(end) {
                self.ended.push(end);
            }
        }
        if self.ended.iter().any(|end| !end.status.success()) {
            self.enter(RoundPhase::Grace, self.config.failure_grace);
        }
    }

    /// Whether the others continue after this rank has ended. Starts a replacement if the configuration allows it.
    pub(super) fn goes_on_without(&mut self, end: Ended) -> bool {
        let Some(elastic) = &self.config.elastic else { return false };
        // On several nodes the coordinator knows whether the ranks have formed a group: a rank of another node may have
        // reported it.
        let may = (self.has_group || self.config.nodes > 1) && self.is_at_work() && self.signal.is_none();
        if end.status.success() || end.asked_to_end || !may {
            return false;
        }
        if self.config.nodes > 1 {
            // A rank that stops with a checkpoint ends the job there.
            if end.is_checkpointed() {
                return false;
            }
            // The remaining ranks of all nodes together have to be enough, which the coordinator checks.
            self.tell_of_loss(end);
            if !self.has_group {
                self.announce_own(end);
            }
            return true;
        }
        let Ended { rank, status, .. } = end;
        let pid = self.workers.list[self.local_rank(rank)].pid;
        let left = self.workers.at_work() + self.ended_well();
        // Replacements count, the next one too, but without the others there is no group that they could join.
        // One that was asked by itself to leave is not replaced.
        let next = if end.is_checkpointed() { 0 } else { self.next_replacement() };
        if left == 0 || left + self.workers.joining() + next < elastic.min || self.was_last_at_work(end) {
            return false;
        }
        let replaced = if next > 0 { self.replace(rank) } else { None };
        // The next one could not be started.
        if left + self.workers.joining() < elastic.min {
            return false;
        }
        self.lost.push(end);
        let go_on = if left == 1 { "the other goes on" } else { "the others go on" };
        match replaced {
            // If others go on, they say so themselves, and if all are about to leave, none does.
            _ if end.is_checkpointed() => {}
            Some(new) => {
                tracing::warn!("rank {rank} (pid {pid}) {status}; {go_on}, and rank {new} takes its place")
            }
            None => tracing::warn!("rank {rank} (pid {pid}) {status}; {go_on}, {left} in all"),
        }
        true
    }

    /// Number of ranks, 1 or 0, that can still be started in the place of the next lost one.
    fn next_replacement(&self) -> usize {
        usize::from(self.ended_well() == 0 && self.workers.has_spare())
    }

    /// Whether no member of the group has worked on after this one ended: then its part of the result is missing, even
    /// if others had ended well before.
    fn was_last_at_work(&self, end: Ended) -> bool {
        let was_member = !self.workers.list[self.local_rank(end.rank)].is_outside_group();
        let mut later = self.ended.iter().filter(|other| other.status.success() && other.at > end.at);
        was_member && self.workers.at_work() == 0 && later.next().is_none()
    }

    /// Starts a rank in the place of this one, and returns its number.
    fn replace(&mut self, rank: usize) -> Option<usize> {
        self.workers.add(self.config, self.job).unwrap_or_else(|error| {
            tracing::warn!("no rank can be started in the place of rank {rank}: {error}");
            None
        })
    }

    pub(super) fn tell_of_loss(&mut self, end: Ended) {
        self.lost.push(end);
        let is_final = self.config.is_final(end.status);
        self.nodes.send(NodeMessage::Lost { failure: self.failure(end), is_final });
    }

    /// Whether the coordinator decides what a lost rank means for the job.
    pub(super) fn are_lost_here(&self) -> bool {
        self.config.nodes > 1 && self.config.elastic.is_some()
    }

    /// Whether the result is left to the coordinator: all ranks of this node have ended by themselves, and all failures
    /// were reported to it. It may still receive a report from another node that the ranks had formed a group; then the
    /// others continue. So this launcher does not report a failure of its own.
    pub(super) fn is_left_to_coordinator(&self) -> bool {
        let is_known =
            |end: &Ended| end.status.success() || self.lost.iter().any(|lost| lost.rank == end.rank);
        let is_undisturbed = self.stopped_by().is_none() && self.output_error.is_none();
        let by_themselves = self.workers.list.iter().all(|worker| !worker.asked_to_end);
        // If ranks were lost while the others continued, this launcher must weigh those losses against the failure that
        // ended the job.
        let is_open = !self.gone_on || self.ended.iter().all(|end| end.status.success());
        self.are_lost_here() && is_undisturbed && by_themselves && is_open && self.ended.iter().all(is_known)
    }

    /// Sends the last lines of the lost ranks to the coordinator; what is kept of each fits into one message.
    pub(super) fn tell_last_lines(&self, mut tails: Vec<VecDeque<String>>) {
        for rank in self.lost.iter().map(|lost| lost.rank) {
            let tail = tails.get_mut(self.local_rank(rank)).map(std::mem::take).unwrap_or_default();
            if !tail.is_empty() {
                self.nodes.send(NodeMessage::LastLines { rank, lines: tail.into() });
            }
        }
    }
}
