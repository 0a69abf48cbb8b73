//! `process-groups`, from the PyTorch handbook: backends, ranks, rendezvous, collectives and subgroups.

mod groups;
mod operations;
mod ranks;
mod rendezvous;
mod stage;

use clap::Args;
use cli::backends;
use cli::error::Error;
use cli::options::{DeviceKind, RankOptions};
use cli::prelude::*;
use cli::same_options::agree_on_options;
use cli::start::{self, Start};
use comm::TcpConfig;
use launch::NodeLayout;
use report::trace;

use stage::OrderedOutput;

const NAME: &str = "process-groups";
const WORLD_SIZE: usize = 2;

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
pub(crate) struct ProcessGroupsOptions {
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
    pub(super) fn layout(&self) -> Result<NodeLayout> {
        let layout = NodeLayout::new(self.nodes, self.nproc_per_node).ok();
        layout.filter(|layout| layout.world_size() <= MOST_LINES).ok_or_else(|| {
            let help = format!(
                "with --nproc-per-node {} give a table of {MOST_LINES} ranks at most",
                self.nproc_per_node
            );
            Error::Option { option: "--nodes", got: self.nodes.to_string(), help }
        })
    }
}

/// Runs the command: starts the ranks, or runs the demonstration on one of them.
///
/// # Errors
/// A wrong option, a rank that failed.
pub(crate) fn run(options: &ProcessGroupsOptions) -> Result<()> {
    let start = Start::find(&options.ranks, NAME, WORLD_SIZE)?;
    options.layout()?;
    trace::install(false)?;
    match start {
        Start::Launcher { world_size } => {
            if world_size > 1 {
                note(format_args!(
                    "a group has the order of the list that it is made of; torch.distributed.new_group sorts the list \
                    first, so that \
                     in new_group([1, 0]) rank 1 is rank 0 here and rank 1 there"
                ));
            }
            start::spawn::<()>(NAME, world_size, options.ranks.grace)
        }
        Start::Rank { config, spawned } => {
            let in_rank = |source| Error::in_rank(config.rank, source);
            show(options, &config).map_err(in_rank)?;
            if spawned && config.rank == 0 { start::hand_over(&()) } else { Ok(()) }
        }
    }
}

fn show(options: &ProcessGroupsOptions, config: &TcpConfig) -> Result<()> {
    let device = options.ranks.device(DeviceKind::Auto)?;
    let world = backends::connect(options.ranks.backend, &device, config)?;
    agree_on_options(&*world, &[], Vec::new)?;
    let stage = OrderedOutput::new(&*world, &device);
    stage.say(format_args!("===== back ends ====="))?;
    for backend in backends::detect_backends() {
        stage.say(format_args!("{backend}"))?;
    }
    ranks::show(&stage, &*world, options.layout()?)?;
    if world.backend() != "mpi" {
        rendezvous::show(&stage, config)?;
    }
    operations::show(&stage)?;
    groups::show(&stage)?;
    stage.title("closing the world group")?;
    // No rank may leave before all have finished.
    world.barrier()?.wait()?;
    drop(world);
    if config.rank == 0 { say(format_args!("is_initialized False")) } else { Ok(()) }
}
