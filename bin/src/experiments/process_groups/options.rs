//! The options of `process-groups`.

use clap::Args;
use launch::Layout;

use crate::error::{Error, Result};
use crate::options::{RankOptions, count};

/// Options of `process-groups`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Shows, on --world-size ranks: the back ends and what is missing for those that cannot be used here; each rank's place; \
how ranks meet, by env://, tcp:// and file:// in turn (with --init-method by that one alone), what happens when one does \
not come, and that the meeting place is not needed once they are connected; all_reduce, send, recv, reduce, broadcast and \
all_gather, with what each rank had before and after; groups of some of the ranks, and closing one of them. \
A group has the order of the list that it is made of: in new_group([1, 0]) rank 1 has get_rank 0. PyTorch sorts the list first.

--nodes and --nproc-per-node are for the table of ranks over nodes, which the launcher's own formula computes; no such \
ranks are started.")]
pub struct ProcessGroupsOptions {
    #[command(flatten)]
    pub(super) ranks: RankOptions,
    /// Nodes in the table of ranks
    #[arg(long, value_name = "N", default_value = "2", value_parser = count, allow_negative_numbers = true)]
    pub(super) nodes: usize,
    /// Ranks on each node in that table
    #[arg(long, value_name = "N", default_value = "4", value_parser = count, allow_negative_numbers = true)]
    pub(super) nproc_per_node: usize,
}

/// A longer table helps nobody.
const MOST_LINES: usize = 4096;

impl ProcessGroupsOptions {
    /// The nodes and ranks of the table.
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
