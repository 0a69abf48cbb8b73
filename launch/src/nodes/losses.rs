//! Ranks that an elastic job has lost, as the coordinator counts them.

use std::collections::BTreeSet;
use std::time::Instant;

use comm::EXIT_PEER_FAILED;

use crate::{ExitKind, WorkerFailure};

/// A rank's failure.
#[derive(Debug, Clone)]
pub(super) struct Failed {
    pub(super) failure: WorkerFailure,
    pub(super) at: Instant,
    pub(super) is_final: bool,
}

impl Failed {
    /// Whether the failure is not attributed to another rank.
    pub(super) fn is_own(&self) -> bool {
        self.failure.status != ExitKind::Code(EXIT_PEER_FAILED)
    }
}

/// What the coordinator knows about the ranks that one round has lost.
#[derive(Default)]
pub(super) struct Losses {
    has_met: bool,
    /// Ranks that have failed, and ranks excluded from the group, which may not have ended.
    ranks: BTreeSet<usize>,
    /// Ranks whose processes have ended, well or not.
    ended: BTreeSet<usize>,
    /// By node: whether it is lost, with all of its ranks.
    nodes: Vec<bool>,
    /// Failures after which too few ranks are left, with their nodes. Replaced by the node's own report when its round
    /// has ended.
    fatal: Vec<(usize, Failed)>,
    /// The last failure after which the others continued, with its node.
    last: Option<(usize, Failed)>,
    /// Messages about nodes that were lost before the report that the ranks have formed a group.
    early_nodes: Vec<String>,
}

impl Losses {
    pub(super) fn new(nodes: usize) -> Self {
        Self { nodes: vec![false; nodes], ..Self::default() }
    }

    /// Records that the ranks have formed a group, and which ranks it excludes. From then on no rank waits for a lost
    /// one. Returns true the first time.
    pub(super) fn met(&mut self, without: Vec<usize>) -> bool {
        self.ranks.extend(without);
        !std::mem::replace(&mut self.has_met, true)
    }

    pub(super) fn has_met(&self) -> bool {
        self.has_met
    }

    /// Whether the remaining ranks can continue: there is a group, no failure was fatal, and at least `min` ranks are
    /// left.
    pub(super) fn can_go_on(&self, local_world_size: usize, min: usize) -> bool {
        self.has_met && self.fatal.is_empty() && self.left(local_world_size) >= min
    }

    /// Records that this rank is lost. Returns false if it was before, or was excluded from the group.
    pub(super) fn add(&mut self, rank: usize) -> bool {
        self.ranks.insert(rank)
    }

    /// Records that the process of this rank has ended.
    pub(super) fn add_end(&mut self, rank: usize) {
        self.ended.insert(rank);
    }

    /// Records that all ranks of this node are lost.
    pub(super) fn add_node(&mut self, node: usize) {
        self.nodes[node] = true;
    }

    /// Records a failure after which the others continue.
    pub(super) fn keep(&mut self, node: usize, failed: Failed) {
        self.last = Some((node, failed));
    }

    pub(super) fn take_last(&mut self) -> Option<(usize, Failed)> {
        self.last.take()
    }

    /// Records a message about a lost node, for the case that the ranks turn out to have formed a group.
    pub(super) fn note_early(&mut self, what: String) {
        if !self.has_met {
            self.early_nodes.push(what);
        }
    }

    pub(super) fn early_nodes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.early_nodes)
    }

    /// False for a node whose ranks have all ended before the report that the ranks have formed a group: it has nothing
    /// to stop.
    pub(super) fn may_have_ranks(&self, node: usize, local_world_size: usize) -> bool {
        let first = node.saturating_mul(local_world_size);
        let lost = self.ranks.range(first..first.saturating_add(local_world_size)).count();
        self.has_met || lost < local_world_size
    }

    /// Returns the number of remaining ranks, with `local_world_size` ranks on each node.
    pub(super) fn left(&self, local_world_size: usize) -> usize {
        self.all_but(self.ranks.iter(), local_world_size)
    }

    /// Returns the number of remaining ranks whose processes run.
    pub(super) fn at_work(&self, local_world_size: usize) -> usize {
        self.all_but(self.ranks.union(&self.ended), local_world_size)
    }

    /// Returns the number of ranks of all nodes that are not lost, without those in `absent`.
    fn all_but<'a>(&self, absent: impl Iterator<Item = &'a usize>, local_world_size: usize) -> usize {
        let nodes = self.nodes.iter().filter(|is_lost| !**is_lost).count();
        let is_there = |node: usize| self.nodes.get(node) == Some(&false);
        let of_these = |rank: &&usize| rank.checked_div(local_world_size).is_some_and(is_there);
        let absent = absent.filter(of_these).count();
        nodes.saturating_mul(local_world_size).saturating_sub(absent)
    }

    /// Stores the last lines of a rank's standard error with its failure, if that may become the reported cause.
    pub(super) fn keep_last_lines(&mut self, node: usize, rank: usize, lines: &[String]) {
        let all = self.fatal.iter_mut().chain(&mut self.last);
        for (_, failed) in all.filter(|(of, failed)| (*of, failed.failure.rank) == (node, rank)) {
            failed.failure.stderr_tail = lines.to_vec();
        }
    }

    /// Records a failure after which too few ranks are left.
    pub(super) fn add_fatal(&mut self, node: usize, failed: Failed) {
        self.fatal.push((node, failed));
    }

    pub(super) fn take_fatal(&mut self) -> Vec<(usize, Failed)> {
        std::mem::take(&mut self.fatal)
    }

    pub(super) fn put_back(&mut self, fatal: Vec<(usize, Failed)>) {
        self.fatal = fatal;
    }

    /// Drops the failures of a node whose launcher has reported its first cause itself.
    pub(super) fn drop_fatal_of(&mut self, node: usize) {
        self.fatal.retain(|(of, _)| *of != node);
    }

    pub(super) fn fatal(&self) -> impl Iterator<Item = &Failed> {
        self.fatal.iter().map(|(_, failed)| failed)
    }
}
