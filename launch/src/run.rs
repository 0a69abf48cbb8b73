//! Entry point of a program whose processes are ranks, whichever launcher starts them.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use comm::{EXIT_PEER_FAILED, LaunchedRank, Tcp, TcpConfig, launcher};

use super::spawn;
use crate::{Result, SpawnConfig, worker_guard};

/// One rank of a job, passed to the training function by [`run`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RankContext {
    /// Global rank, local rank and sizes.
    pub place: LaunchedRank,
    /// Connection settings from the environment; may be changed before [`RankContext::connect`].
    pub config: TcpConfig,
}

impl RankContext {
    /// Connects to the other ranks.
    ///
    /// # Errors
    /// Those of [`Tcp::connect`].
    pub fn connect(&self) -> comm::Result<Tcp> {
        Tcp::connect(&self.config)
    }
}

/// Runs this program as a job of ranks, each of which calls `train`. Call it first thing in `main`, and return its
/// result.
///
/// In a process that is a rank already, it calls `train` at once. [`LaunchedRank::from_env`] detects this; it knows `girandole
/// launch`, [`spawn`], `torchrun`, Slurm, Open MPI, MPICH and Kubeflow. These set the number of ranks; `world_size` is
/// not used. Otherwise it starts `world_size` processes of this program with the same arguments, each of which calls
/// `run` again from `main`, and returns when all have ended, as [`spawn`] does. Code in `main` before this call runs in
/// every process.
///
/// An error is reported as one line on standard error, the error's `Display`: `rank 1: error: ...` in a rank, `error:
/// ...` with the first cause in the process that started the ranks.
///
/// The exit code is 0 on success; 1 after an error; [`EXIT_PEER_FAILED`] in a rank that failed because another one did;
/// 2 for an environment or a `world_size` that cannot be used; 128 plus the signal number if a signal ended the job.
///
/// A program that needs the reports of its ranks, a grace period or restarts calls [`spawn`].
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
    // The alternate form of errors with a context, such as those of `anyhow`, includes the causes.
    let text = format!("{error:#}");
    say(format_args!("rank {rank}: error: {text}"));
    ExitCode::from(if launcher::is_peer_failure_text(&text) { EXIT_PEER_FAILED as u8 } else { 1 })
}

/// Returns the context of the rank that this process is; `None` if this process has started the ranks and all have
/// succeeded.
fn find_or_start(world_size: usize) -> Result<Option<RankContext>> {
    worker_guard()?;
    if let Some(place) = LaunchedRank::from_env()? {
        return Ok(Some(RankContext { place, config: TcpConfig::from_env()? }));
    }
    let config = SpawnConfig { world_size, ..SpawnConfig::default() };
    config.check()?;
    launcher::check_for_ranks(world_size, None, None)?;
    spawn(&config).map(|_| None)
}

/// Writes a line to standard error. If that fails, only the exit code reports the error.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
