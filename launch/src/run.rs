//! The one entry of a program whose processes are ranks, whoever starts them.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use comm::{EXIT_PEER_FAILED, Place, Result, Tcp, TcpConfig, launcher};

use super::spawn;
use crate::{SpawnConfig, worker_guard};

/// One rank of a job, as [`run`] passes it to the program's function.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RankContext {
    /// Its number among all ranks, and among those of its node.
    pub place: Place,
    /// How it joins the others, as the environment tells; what it says may be changed before [`RankContext::connect`].
    pub config: TcpConfig,
}

impl RankContext {
    /// Meets the other ranks.
    ///
    /// # Errors
    /// Those of [`Tcp::connect`].
    pub fn connect(&self) -> Result<Tcp> {
        Tcp::connect(&self.config)
    }
}

/// Makes this program a job of ranks, each of which calls `train`; to be called first thing in `main`, whose result it gives.
///
/// Where this process is a rank already, it calls `train` at once: [`Place::from_env`] tells, which knows `girandole launch`,
/// [`spawn`], `torchrun`, Slurm, Open MPI, MPICH and Kubeflow. These say how many ranks there are; `world_size` is not used.
/// Otherwise it starts `world_size` processes of this program with the same arguments, in each of which `main` comes here
/// again, and returns when all have ended, as [`spawn`] does. What `main` does before this call is done in every process.
///
/// What goes wrong is one line on standard error, the error's `Display`: `rank 1: error: ...` in a rank, `error: ...` with the
/// first cause in the process that started the ranks.
///
/// The exit code is 0; 1 after an error; [`EXIT_PEER_FAILED`] in a rank that failed because another one did; 2 for an environment or
/// a `world_size` that cannot be used; 128 and the number of the signal that ended the job.
///
/// A program that needs what its ranks report, a signal's grace or restarts calls [`spawn`].
///
/// ```no_run
/// use std::process::ExitCode;
///
/// use candle_core::{Device, Tensor};
/// use launch::RankContext;
/// use comm::{Communicator, ReduceOp, Result};
///
/// fn train(rank: RankContext) -> Result<()> {
///     let comm = rank.connect()?;
///     let tensor = Tensor::new(&[comm.rank() as f32], &Device::Cpu)?;
///     comm.all_reduce(&tensor, ReduceOp::Avg)?.wait()?;
///     println!("rank {}: {tensor}", comm.rank());
///     Ok(())
/// }
///
/// fn main() -> ExitCode {
///     launch::run(2, train)
/// }
/// ```
pub fn run<E: Display>(
    world_size: usize,
    train: impl FnOnce(RankContext) -> std::result::Result<(), E>,
) -> ExitCode {
    let context = match find_or_start(world_size) {
        Ok(Some(context)) => context,
        Ok(None) => return ExitCode::SUCCESS,
        Err(error) => {
            if !error.is_unread_output() {
                say(format_args!("error: {error}"));
            }
            return ExitCode::from(error.exit_code());
        }
    };
    let rank = context.place.rank;
    let Err(error) = train(context) else { return ExitCode::SUCCESS };
    // The alternate form of errors with a context, such as those of `anyhow`, has the causes as well.
    let text = format!("{error:#}");
    say(format_args!("rank {rank}: error: {text}"));
    ExitCode::from(if launcher::names_another_rank(&text) { EXIT_PEER_FAILED as u8 } else { 1 })
}

/// The rank that this process is; none where it has started the ranks, and all of them have ended well.
fn find_or_start(world_size: usize) -> Result<Option<RankContext>> {
    worker_guard()?;
    if let Some(place) = Place::from_env()? {
        return Ok(Some(RankContext { place, config: TcpConfig::from_env()? }));
    }
    let config = SpawnConfig { world_size, ..SpawnConfig::default() };
    config.check()?;
    TcpConfig::check_for_ranks(world_size, None, None)?;
    spawn(&config).map(|_| None)
}

/// Where nobody reads it, the exit code has to do.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
