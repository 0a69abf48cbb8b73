//! Ranks that a job on several nodes has lost, where it goes on without some.

use std::collections::BTreeSet;
use std::time::Instant;

use comm::{EXIT_PEER_FAILED, ExitKind, WorkerFailure};

/// A rank's failure, as the council knows it.
#[derive(Debug, Clone)]
pub(super) struct Failed {
    pub(super) failure: WorkerFailure,
    pub(super) at: Instant,
    pub(super) is_final: bool,
}

impl Failed {
    /// It is not put down to another rank.
    pub(super) fn is_own(&self) -> bool {
        self.failure.status != ExitKind::Code(EXIT_PEER_FAILED)
    }
}

/// What is known of the ranks that one round has lost.
#[derive(Default)]
pub(super) struct Losses {
    has_met: bool,
    /// Those that have failed, and those that the others have left behind, which may not have ended.
    ranks: BTreeSet<usize>,
    /// By node: whether it is lost, with all of its ranks.
    nodes: Vec<bool>,
    /// Those that were one too many, by node: their launchers tell more of them when they have ended.
    fatal: Vec<(usize, Failed)>,
    /// The last one without which the others go on.
    last: Option<(usize, Failed)>,
    /// What is said of nodes that were lost before it was known that the ranks have met.
    early_nodes: Vec<String>,
}

impl Losses {
    pub(super) fn new(nodes: usize) -> Self {
        Self { nodes: vec![false; nodes], ..Self::default() }
    }

    /// The ranks have met, without these: those that are left no longer wait for one that is lost. True for the first time.
    pub(super) fn met(&mut self, without: Vec<usize>) -> bool {
        self.ranks.extend(without);
        !std::mem::replace(&mut self.has_met, true)
    }

    pub(super) fn has_met(&self) -> bool {
        self.has_met
    }

    /// Whether those that are left, of nodes with so many ranks each, can go on.
    pub(super) fn can_go_on(&self, local_world_size: usize, min: usize) -> bool {
        self.has_met && self.fatal.is_empty() && self.left(local_world_size) >= min
    }

    /// This rank of the job is lost.
    pub(super) fn add(&mut self, rank: usize) {
        self.ranks.insert(rank);
    }

    /// All ranks of this node are.
    pub(super) fn add_node(&mut self, node: usize) {
        self.nodes[node] = true;
    }

    /// Without this one the others go on.
    pub(super) fn keep(&mut self, node: usize, failed: Failed) {
        self.last = Some((node, failed));
    }

    pub(super) fn take_last(&mut self) -> Option<(usize, Failed)> {
        self.last.take()
    }

    /// This is said of a node that is lost, where the ranks turn out to have met.
    pub(super) fn note_early(&mut self, what: String) {
        if !self.has_met {
            self.early_nodes.push(what);
        }
    }

    pub(super) fn early_nodes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.early_nodes)
    }

    /// False for a node whose ranks have all ended before they were known to have met: it has nothing to stop.
    pub(super) fn may_have_ranks(&self, node: usize, local_world_size: usize) -> bool {
        let first = node.saturating_mul(local_world_size);
        let lost = self.ranks.range(first..first.saturating_add(local_world_size)).count();
        self.has_met || lost < local_world_size
    }

    /// How many are left of nodes with so many ranks each.
    pub(super) fn left(&self, local_world_size: usize) -> usize {
        let nodes = self.nodes.iter().filter(|is_lost| !**is_lost).count();
        let is_there = |node: usize| self.nodes.get(node) == Some(&false);
        let of_these = |rank: &&usize| rank.checked_div(local_world_size).is_some_and(is_there);
        let lost = self.ranks.iter().filter(of_these).count();
        nodes.saturating_mul(local_world_size).saturating_sub(lost)
    }

    /// What a rank of a node has written last: for its failure, where that may be the one that all are told.
    pub(super) fn keep_last_lines(&mut self, (node, rank): (usize, usize), lines: &[String]) {
        let all = self.fatal.iter_mut().chain(&mut self.last);
        for (_, failed) in all.filter(|(of, failed)| (*of, failed.failure.rank) == (node, rank)) {
            failed.failure.stderr_tail = lines.to_vec();
        }
    }

    /// Without this one the others are too few.
    pub(super) fn add_fatal(&mut self, node: usize, failed: Failed) {
        self.fatal.push((node, failed));
    }

    pub(super) fn take_fatal(&mut self) -> Vec<(usize, Failed)> {
        std::mem::take(&mut self.fatal)
    }

    pub(super) fn put_back(&mut self, fatal: Vec<(usize, Failed)>) {
        self.fatal = fatal;
    }

    /// A node's launcher has told itself what has failed there.
    pub(super) fn told_by(&mut self, node: usize) {
        self.fatal.retain(|(of, _)| *of != node);
    }

    pub(super) fn fatal(&self) -> impl Iterator<Item = &Failed> {
        self.fatal.iter().map(|(_, failed)| failed)
    }
}
