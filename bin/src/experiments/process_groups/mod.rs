//! `process-groups`, from the PyTorch handbook: backends, ranks, rendezvous, collectives and subgroups.

mod groups;
mod operations;
mod options;
mod ranks;
mod rendezvous;
mod stage;

pub use options::ProcessGroupsOptions;

use comm::TcpConfig;
use experiment::backends;
use experiment::console::{note, say};
use experiment::error::{Error, Result};
use experiment::options::DeviceKind;
use experiment::start::{self, Start};
use report::trace;

use stage::OrderedOutput;

const NAME: &str = "process-groups";
const WORLD_SIZE: usize = 2;

/// Runs the command: starts the ranks, or runs the demonstration on one of them.
///
/// # Errors
/// A wrong option, a rank that failed.
pub fn run(options: &ProcessGroupsOptions) -> Result<()> {
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
            start::spawn::<()>(NAME, world_size, None)
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
