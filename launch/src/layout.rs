//! Numbering of ranks over the nodes of a job.

use std::ops::Range;

use comm::{Error, Result};

/// Numbering of ranks over nodes (machines): node by node, the same number on each.
///
/// ```
/// use launch::NodeLayout;
///
/// let layout = NodeLayout::new(2, 4)?;
/// assert_eq!(layout.world_size(), 8);
/// assert_eq!(layout.node_and_local_rank(6), (1, 2));
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeLayout {
    nodes: usize,
    local_world_size: usize,
}

impl NodeLayout {
    /// Creates a layout of `nodes` nodes with `local_world_size` ranks each.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if one of them is 0, or the number of ranks overflows.
    pub fn new(nodes: usize, local_world_size: usize) -> Result<Self> {
        for (what, count) in [("nodes", nodes), ("local_world_size", local_world_size)] {
            if count == 0 {
                return Err(Error::invalid(what, 0, "at least 1 is needed"));
            }
        }
        match nodes.checked_mul(local_world_size) {
            Some(_) => Ok(Self { nodes, local_world_size }),
            None => {
                Err(Error::invalid("nodes", nodes, format!("too many, with {local_world_size} ranks each")))
            }
        }
    }

    /// Number of nodes.
    pub fn nodes(self) -> usize {
        self.nodes
    }

    /// Number of ranks on each node.
    pub fn local_world_size(self) -> usize {
        self.local_world_size
    }

    /// Number of ranks on all nodes together.
    pub fn world_size(self) -> usize {
        self.nodes * self.local_world_size
    }

    /// Returns the global rank: `node_rank * local_world_size + local_rank`.
    pub(crate) fn global_rank(self, node_rank: usize, local_rank: usize) -> usize {
        node_rank * self.local_world_size + local_rank
    }

    /// Returns the node and the local rank of a global rank.
    pub fn node_and_local_rank(self, global_rank: usize) -> (usize, usize) {
        (global_rank / self.local_world_size, global_rank % self.local_world_size)
    }

    /// Returns the global ranks of a node.
    pub fn ranks_of(self, node_rank: usize) -> Range<usize> {
        self.global_rank(node_rank, 0)..self.global_rank(node_rank + 1, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_one_place_and_each_place_one_rank() {
        for (nodes, local) in [(1, 1), (1, 4), (2, 4), (3, 5), (7, 1)] {
            let layout = NodeLayout::new(nodes, local).unwrap();
            let places = (0..nodes).flat_map(|node| (0..local).map(move |rank| (node, rank)));
            for (rank, (node, local_rank)) in places.enumerate() {
                assert_eq!(layout.global_rank(node, local_rank), rank);
                assert_eq!(layout.node_and_local_rank(rank), (node, local_rank));
                assert!(layout.ranks_of(node).contains(&rank));
            }
            assert_eq!((layout.world_size(), layout.ranks_of(nodes - 1).end), (nodes * local, nodes * local));
        }
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        assert_eq!(NodeLayout::new(0, 4).unwrap_err().to_string(), "nodes: got 0; at least 1 is needed");
        assert!(NodeLayout::new(2, 0).unwrap_err().to_string().starts_with("local_world_size: got 0"));
        assert!(NodeLayout::new(usize::MAX, 2).unwrap_err().to_string().contains("too many"));
    }
}
