//! Ranks that are lost in an elastic job, and what the others do.

use comm::WorkerFailure;

use super::{Stage, Supervisor};
use crate::failure::Ended;
use crate::nodes::Word;
use crate::start::Worker;

impl Supervisor<'_> {
    /// In an elastic job, ranks that are apart from those that have done it need not be waited for.
    pub(super) fn look_who_is_left(&mut self) {
        let Some(elastic) = &self.config.elastic else { return };
        if self.are_too_few(elastic.min) {
            return;
        }
        let some_run = self.workers.running() > 0 && self.ended_well() > 0;
        let only_apart = some_run && self.workers.those_that_run().all(Worker::is_apart);
        match (self.stage, only_apart) {
            (Stage::Running, true) => self.enter(Stage::Finishing, elastic.finish),
            (Stage::Finishing, false) => (self.stage, self.deadline) = (Stage::Running, None),
            _ => {}
        }
    }

    /// Those that have failed were taken for lost while ranks that were left behind meanwhile seemed to go on: true where that is
    /// so, and the job ends. On several nodes the council knows.
    fn are_too_few(&mut self, min: usize) -> bool {
        let left = self.workers.at_work() + self.ended_well();
        let are_enough = left > 0 && left + self.workers.on_their_way() >= min;
        if are_enough || self.stage != Stage::Running || self.config.nodes > 1 {
            return false;
        }
        let Some(last) = self.lost.pop() else { return false };
        self.blame_the_lost();
        self.ended.push(last);
        self.enter(Stage::Grace, self.grace);
        true
    }

    fn ended_well(&self) -> usize {
        self.ended.iter().filter(|end| end.status.success()).count()
    }

    /// What was lost just now may be the cause of what has ended the job.
    pub(super) fn blame_the_lost(&mut self) {
        let recent = |lost: &Ended| lost.at.elapsed() < self.grace;
        self.ended.extend(self.lost.iter().copied().filter(recent));
    }

    /// The ranks have met, as one of them tells after others have failed. They have met with those: without them there would have
    /// been no group.
    pub(super) fn go_on_without_the_first(&mut self) {
        if self.stage != Stage::Grace {
            return;
        }
        (self.stage, self.deadline) = (Stage::Running, None);
        let (failed, well) =
            std::mem::take(&mut self.ended).into_iter().partition(|end| !end.status.success());
        self.ended = well;
        let failed: Vec<Ended> = failed;
        for end in failed {
            // The council was told already.
            if self.lost.iter().any(|lost| lost.rank == end.rank) {
                continue;
            }
            let found = self.workers.list.iter().position(|worker| worker.rank == end.rank);
            let local_rank = found.unwrap_or_default();
            let pid = self.workers.list[local_rank].pid;
            if !self.goes_on_without(end, local_rank, pid) {
                self.ended.push(end);
            }
        }
        if self.ended.iter().any(|end| !end.status.success()) {
            self.enter(Stage::Grace, self.grace);
        }
    }

    /// Whether the others go on where this one has failed; another one may take its place.
    pub(super) fn goes_on_without(&mut self, end: Ended, local_rank: usize, pid: u32) -> bool {
        let Some(elastic) = &self.config.elastic else { return false };
        // On several nodes the council knows whether the ranks have met: one of another node may have told.
        let may = (self.met || self.config.nodes > 1) && self.is_at_work() && self.signal.is_none();
        if end.status.success() || end.told || !may {
            return false;
        }
        let Ended { rank, status, .. } = end;
        if self.config.nodes > 1 {
            // All nodes together have to be enough, which the council knows.
            self.lost.push(end);
            let log = self.output.log(local_rank);
            let failure =
                WorkerFailure { rank, pid, status, stderr_tail: Vec::new(), also_failed: 0, node: None, log };
            self.nodes.tell(Word::Lost { failure, is_final: self.config.is_final(status) });
            if !self.met {
                self.announce(end);
            }
            return true;
        }
        let done = self.ended_well();
        let left = self.workers.at_work() + done;
        // Newcomers count as soon as they are started; without the others there is nothing that they could join.
        if left == 0 || left + self.workers.on_their_way() < elastic.min {
            return false;
        }
        self.lost.push(end);
        let replaced = match done {
            0 => self.workers.add(self.config, self.job).unwrap_or_else(|error| {
                tracing::warn!("no rank can be started in the place of rank {rank}: {error}");
                None
            }),
            _ => None,
        };
        let go_on = if left == 1 { "the other goes on" } else { "the others go on" };
        match replaced {
            Some(new) => {
                tracing::warn!("rank {rank} (pid {pid}) {status}; {go_on}, and rank {new} takes its place")
            }
            None => tracing::warn!("rank {rank} (pid {pid}) {status}; {go_on}, {left} in all"),
        }
        true
    }
}
