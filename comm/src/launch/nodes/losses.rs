//! Ranks that a job on several nodes has lost, where it goes on without some.

use super::council::Failed;

/// What is known of the ranks that one round has lost.
#[derive(Default)]
pub(super) struct Losses {
    has_met: bool,
    /// How many, by node.
    lost: Vec<usize>,
    /// Those that were one too many, by node: their launchers tell more of them when they have ended.
    fatal: Vec<(usize, Failed)>,
}

impl Losses {
    pub(super) fn new(nodes: usize) -> Self {
        Self { has_met: false, lost: vec![0; nodes], fatal: Vec::new() }
    }

    /// The ranks have met: those that are left no longer wait for one that is lost.
    pub(super) fn met(&mut self) {
        self.has_met = true;
    }

    /// Whether those that are left, of nodes with so many ranks each, can go on.
    pub(super) fn can_go_on(&self, local_world_size: usize, min: usize) -> bool {
        self.has_met && self.fatal.is_empty() && self.left(local_world_size) >= min
    }

    /// One more rank of this node is lost.
    pub(super) fn add(&mut self, node: usize) {
        self.lost[node] += 1;
    }

    /// All ranks of this node are.
    pub(super) fn add_node(&mut self, node: usize, local_world_size: usize) {
        self.lost[node] = local_world_size;
    }

    /// How many are left of nodes with so many ranks each.
    pub(super) fn left(&self, local_world_size: usize) -> usize {
        let of_node = |lost: &usize| local_world_size.saturating_sub(*lost);
        self.lost.iter().map(of_node).fold(0, usize::saturating_add)
    }

    /// Without this one the others are too few.
    pub(super) fn add_fatal(&mut self, node: usize, failed: Failed) {
        self.fatal.push((node, failed));
    }

    /// A node's launcher has told itself what has failed there.
    pub(super) fn told_by(&mut self, node: usize) {
        self.fatal.retain(|(of, _)| *of != node);
    }

    pub(super) fn fatal(&self) -> impl Iterator<Item = &Failed> {
        self.fatal.iter().map(|(_, failed)| failed)
    }
}
