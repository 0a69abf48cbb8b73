//! The options of `process-groups`.

use clap::Args;
use experiment::error::{Error, Result};
use experiment::options::{RankOptions, count};
use launch::Layout;

/// Options of `process-groups`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Shows, on --world-size ranks: the backends, and what is missing for those that cannot be used here;
the number and place of each rank; how ranks meet by env://, tcp:// and file:// (with --init-method, by
that one only), what happens when a rank does not come, and that the address is not needed any more
once they are connected; all_reduce, send, recv, reduce, broadcast and all_gather, with the values of
each rank before and after; groups of some of the ranks, and how a group is closed.

A group has the order of the list that it is made of: in new_group([1, 0]) rank 1 has get_rank 0.
PyTorch sorts the list first.

--nodes and --nproc-per-node are for the table of ranks on nodes, which the launcher's own formula
computes; those ranks are not started.")]
pub struct ProcessGroupsOptions {
    #[command(flatten)]
    pub(super) ranks: RankOptions,
    /// Nodes in the table of ranks
    #[arg(long, value_name = "N", default_value = "2", value_parser = count)]
    pub(super) nodes: usize,
    /// Ranks on each node in that table
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    pub(super) nproc_per_node: usize,
}

/// Maximum number of ranks in the table: a longer one is of no use.
const MOST_LINES: usize = 4096;

impl ProcessGroupsOptions {
    /// Returns the nodes and ranks of the table.
    pub(super) fn layout(&self) -> Result<Layout> {
        let layout = Layout::new(self.nodes, self.nproc_per_node).ok();
        layout.filter(|layout| layout.world_size() <= MOST_LINES).ok_or_else(|| {
            let help = format!(
                "with --nproc-per-node {} give a table of {MOST_LINES} ranks at most",
                self.nproc_per_node
            );
            Error::Option { option: "--nodes", got: self.nodes.to_string(), help }
        })
    }
}
