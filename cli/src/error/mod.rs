//! The error type of all commands, with exit codes and one-line messages.

mod from;

use std::io::ErrorKind;
use std::path::PathBuf;

use launch::{EXIT_CHECKPOINTED, EXIT_PEER_FAILED, ExitKind, WorkerFailure, signal_name};
use signal_hook::consts::SIGPIPE;
use training::{Fallback, FileError};

use crate::origin::origin;

/// How many of a failed rank's last lines on standard error are repeated; the launcher has already forwarded them.
const LINES_SHOWN: usize = 5;
/// Separates a rank's name from its message.
const ERROR_SEPARATOR: &str = ": error: ";

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option has a value that cannot be used.
    #[error("{option}: got {got}; {help}")]
    Option {
        /// The option, as it is typed.
        option: &'static str,
        /// Its value.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// An option differs from the run that is to be resumed.
    #[error("{option}: got {got}; {help}")]
    Contradiction {
        /// The option, as it is typed.
        option: String,
        /// Its value now.
        got: String,
        /// Its value in the earlier run, and what to do.
        help: String,
    },
    /// The file of `--recipe` has content that cannot be used.
    #[error("{place}: {problem}")]
    Recipe {
        /// The file and its line.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// Ranks that were started with different options.
    #[error(transparent)]
    Differ(Box<girandole::settings::SettingDifference>),
    /// An undamaged checkpoint of a different run or model.
    #[error("the checkpoint does not fit: {problem}")]
    Checkpoint {
        /// What does not fit.
        problem: String,
    },
    /// A damaged checkpoint, where an undamaged one exists.
    #[error("{source}: {help}")]
    Damaged {
        /// What is wrong with it, and which one is undamaged.
        source: Box<Error>,
        /// How to use the undamaged one.
        help: String,
    },
    /// An environment with only some of the variables of a rank.
    #[error("{set} is set, but {missing} is not; a launcher sets both, {help}")]
    Environment {
        /// The variable that is set, with its value.
        set: String,
        /// The one that is missing.
        missing: String,
        /// What to do.
        help: String,
    },
    /// Two options name the same file.
    #[error("{option}: {} is also the file of {other}; give each its own", path.display())]
    SameFile {
        /// The option, as it is typed.
        option: &'static str,
        /// The other option.
        other: String,
        /// The file.
        path: std::path::PathBuf,
    },
    /// An error in a process that is a rank.
    #[error("rank {rank}{ERROR_SEPARATOR}{source}")]
    InRank {
        /// The rank.
        rank: usize,
        /// What went wrong.
        source: Box<Error>,
    },
    /// A device, backend or feature that this build or machine does not have.
    #[error("{wanted} is not available: {help}")]
    Unavailable {
        /// What was asked for.
        wanted: String,
        /// Why not, and what to do.
        help: String,
    },
    /// More ranks were lost than the run tolerates.
    #[error("{left} of at least {min} ranks are left: {lost}")]
    TooFewRanks {
        /// How many are left.
        left: usize,
        /// How many the run needs at least.
        min: usize,
        /// The failure of the last lost rank.
        lost: comm::Error,
    },
    /// A rank was lost before the first step: the remaining ranks start training from the beginning. Internal; never
    /// shown to the user.
    #[error("the ranks start again")]
    RestartFromBeginning,
    /// The run was stopped early, as it was asked to, with a checkpoint. Rank 0 has said so.
    #[error("stopped{} after step {step}; --resume goes on from there (checkpoints in {})", by(*signal), dir.display())]
    Stopped {
        /// Completed steps.
        step: usize,
        /// The signal that asked for it, if it was one.
        signal: Option<i32>,
        /// The folder of checkpoints.
        dir: PathBuf,
    },
    /// The result that rank 0 handed to the launcher is missing or cannot be decoded.
    #[error("rank 0 ended without a result that can be read: {reason}")]
    NoResult {
        /// What is wrong with it.
        reason: String,
    },
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] std::io::Error),
    /// A file named by an option.
    #[error(transparent)]
    File(#[from] FileError),
    /// The report, the trace or the metrics.
    #[error(transparent)]
    Report(#[from] report::Error),
    /// The sampler or loader.
    #[error(transparent)]
    Sampler(#[from] sampler::SamplerError),
    /// Communication with other ranks.
    #[error(transparent)]
    Comm(comm::Error),
    /// Starting ranks, or what has ended them.
    #[error(transparent)]
    Launch(launch::Error),
    /// A rank of a program started by `launch` failed.
    #[error(transparent)]
    Launched(Box<WorkerFailure>),
    /// Data parallelism.
    #[error(transparent)]
    Ddp(#[from] ddp::Error),
    /// Sharded training.
    #[error(transparent)]
    Fsdp(#[from] fsdp::Error),
    /// An error of what the strategies share, such as checkpoints.
    #[error(transparent)]
    Strategy(strategy::Error),
    /// Tensor parallelism.
    #[error(transparent)]
    TensorParallel(tensor_parallel::Error),
    /// Pipeline parallelism.
    #[error(transparent)]
    Pipeline(pipeline::Error),
    /// Errors of the `training` crate (layers, optimizers, checkpoints).
    #[error(transparent)]
    Training(#[from] training::Error),
    /// Building or training a model in a parallel layout (the `girandole` crate).
    #[error(transparent)]
    Parallel(Box<girandole::Error>),
    /// Computing a plan.
    #[error(transparent)]
    Plan(plan::Error),
    /// Reading a Hugging Face model folder.
    #[error(transparent)]
    Model(#[from] models::Error),
    /// Tensor arithmetic.
    #[error(transparent)]
    Tensor(candle_core::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Refuses the value of an option: returns [`Error::Option`].
///
/// # Errors
/// Always.
pub fn refuse<T>(option: &'static str, got: impl std::fmt::Display, help: impl Into<String>) -> Result<T> {
    Err(Error::Option { option, got: got.to_string(), help: help.into() })
}

impl Error {
    /// Returns the error of a process that is a rank.
    pub fn in_rank(rank: usize, source: Error) -> Self {
        Error::InRank { rank, source: Box::new(source) }
    }

    /// Returns the process's exit code: 2 for a wrong option or a checkpoint that cannot be resumed from,
    /// [`launch::EXIT_PEER_FAILED`] if another rank is at fault, [`launch::EXIT_CHECKPOINTED`] if the run was stopped with a
    /// checkpoint, 128 + signal number if a signal ended it, 141
    /// (SIGPIPE) if the reader of its output has closed the pipe, a launched rank's own exit code, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::InRank { source, .. } => source.exit_code(),
            Error::Option { .. }
            | Error::Contradiction { .. }
            | Error::Recipe { .. }
            | Error::Environment { .. }
            | Error::SameFile { .. }
            | Error::Differ(_)
            | Error::Unavailable { .. }
            | Error::Checkpoint { .. }
            | Error::Damaged { .. } => 2,
            Error::Training(training::Error::InUse { .. }) => 2,
            _ if self.is_damage() => 2,
            Error::Output(error) if error.kind() == ErrorKind::BrokenPipe => 128 + SIGPIPE as u8,
            Error::Launched(failure) => match failure.status {
                // For an outer launcher, this launcher's job has failed, whichever of its ranks caused it.
                ExitKind::Code(EXIT_PEER_FAILED) => 1,
                ExitKind::Code(code) => code.clamp(1, 255) as u8,
                ExitKind::Signal(signal) => (128 + signal).clamp(1, 255) as u8,
            },
            Error::TooFewRanks { .. } => EXIT_PEER_FAILED as u8,
            Error::Stopped { .. } => EXIT_CHECKPOINTED as u8,
            // A rank of this command found an option or file that cannot be used.
            Error::Launch(launch::Error::Worker(failure)) if failure.status == ExitKind::Code(2) => 2,
            Error::Launch(error) => error.exit_code(),
            Error::Comm(error) => error.exit_code(),
            Error::Strategy(error) if error.is_peer_failure() => EXIT_PEER_FAILED as u8,
            Error::Pipeline(error) if error.is_peer_failure() => EXIT_PEER_FAILED as u8,
            Error::Ddp(error) if error.is_peer_failure() => EXIT_PEER_FAILED as u8,
            Error::Fsdp(error) if error.is_peer_failure() => EXIT_PEER_FAILED as u8,
            Error::TensorParallel(error) if error.is_peer_failure() => EXIT_PEER_FAILED as u8,
            Error::Parallel(error) => match **error {
                girandole::Error::PeerFailed { .. } => EXIT_PEER_FAILED as u8,
                girandole::Error::Invalid { .. } | girandole::Error::File { .. } => 2,
                _ => 1,
            },
            _ => 1,
        }
    }

    /// Returns the underlying error if it is the loss of a rank that the remaining ranks can continue without.
    pub(crate) fn rank_loss(&self) -> Option<&comm::Error> {
        match self {
            Error::Comm(error)
            | Error::Ddp(ddp::Error::Comm(error))
            | Error::Fsdp(fsdp::Error::Comm(error)) => Some(error).filter(|error| error.is_loss()),
            _ => None,
        }
    }

    /// True for a damaged checkpoint: a retry would find the same damage.
    fn is_damage(&self) -> bool {
        self.fallback_checkpoint().is_some()
            || matches!(self.of_strategy(), Some(strategy::Error::File { .. }))
    }

    /// Returns the error if it is of what the strategies share.
    fn of_strategy(&self) -> Option<&strategy::Error> {
        match self {
            Error::Strategy(error)
            | Error::Ddp(ddp::Error::Strategy(error))
            | Error::Fsdp(fsdp::Error::Strategy(error))
            | Error::TensorParallel(tensor_parallel::Error::Strategy(error))
            | Error::Pipeline(pipeline::Error::Strategy(error)) => Some(error),
            _ => None,
        }
    }

    /// Returns, for a damaged checkpoint found by any crate, the undamaged one to fall back on.
    pub(crate) fn fallback_checkpoint(&self) -> Option<&Fallback> {
        let error = match self {
            Error::Training(error) => error,
            Error::Strategy(strategy::Error::Training(error))
            | Error::Ddp(ddp::Error::Training(error))
            | Error::Fsdp(fsdp::Error::Training(error))
            | Error::TensorParallel(tensor_parallel::Error::Training(error))
            | Error::Pipeline(pipeline::Error::Training(error)) => error,
            _ => return None,
        };
        match error {
            training::Error::DamagedCheckpoint { good, .. } => Some(good),
            _ => None,
        }
    }

    /// True if the reader of this process's own output has closed the pipe.
    fn is_unread_output(&self) -> bool {
        match self {
            Error::InRank { source, .. } => source.is_unread_output(),
            Error::Output(error) => error.kind() == ErrorKind::BrokenPipe,
            Error::Launch(error) => error.is_unread_output(),
            _ => false,
        }
    }

    /// True if the run was stopped with a checkpoint.
    fn is_stop(&self) -> bool {
        match self {
            Error::InRank { source, .. } => source.is_stop(),
            Error::Stopped { .. } | Error::Launch(launch::Error::Checkpointed) => true,
            _ => false,
        }
    }

    fn is_rendezvous_failure(&self) -> bool {
        matches!(self, Error::Comm(comm::Error::Rendezvous { .. } | comm::Error::Refused { .. }))
    }

    /// Returns the message for the user, without a final newline. `None` if nothing is to be printed, as when the
    /// reader of the output has closed the pipe.
    pub fn message(&self) -> Option<String> {
        match self {
            _ if self.is_unread_output() || self.is_stop() => None,
            // These messages name the rank themselves.
            Error::InRank { source, .. } if source.is_rendezvous_failure() => source.message(),
            Error::InRank { .. } => Some(self.to_string()),
            Error::Launch(launch::Error::Worker(failure)) | Error::Launched(failure) => {
                Some(format_failure(failure))
            }
            // An option from a recipe is reported with the recipe's file and line, since it was not typed.
            Error::Option { option, .. } | Error::SameFile { option, .. } if origin(option).is_some() => {
                origin(option).map(|place| format!("error: {place}: {self}"))
            }
            Error::Comm(comm::Error::InvalidArgument { what, .. }) if origin(what).is_some() => {
                origin(what).map(|place| format!("error: {place}: {self}"))
            }
            _ => Some(format!("error: {self}")),
        }
    }
}

/// Names the signal that has stopped a run, if it was one.
fn by(signal: Option<i32>) -> String {
    signal.map(|signal| format!(" by {}", signal_name(signal))).unwrap_or_default()
}

/// Formats a rank's failure, with the first cause in the last line. If the rank's own last line on standard error is
/// an error message, it is merged into that line instead of being repeated separately.
fn format_failure(failure: &WorkerFailure) -> String {
    let WorkerFailure { rank, status, ref stderr_tail, ref log, .. } = *failure;
    let prefix = format!("rank {rank}{ERROR_SEPARATOR}");
    let said =
        |line: &'_ String| line.strip_prefix(&prefix).or(line.strip_prefix("error: ")).map(str::to_string);
    let words = stderr_tail.last().and_then(said).filter(|_| matches!(status, ExitKind::Code(_)));
    let (headline, others) = (failure.headline(), failure.others());
    let mut lines: Vec<String> = Vec::new();
    if words.is_none() && !stderr_tail.is_empty() {
        lines.push(format!("rank {rank}'s last lines on stderr:"));
        let shown = &stderr_tail[stderr_tail.len().saturating_sub(LINES_SHOWN)..];
        lines.extend(shown.iter().map(|line| format!("    {line}")));
    }
    lines.extend(log.as_ref().map(|log| format!("all that rank {rank} wrote on stderr: {}", log.display())));
    let missing = format!("rank {rank}: the group of ");
    let aside = others.as_ref().map(|others| format!(" ({others})")).unwrap_or_default();
    lines.push(match words {
        // If that rank blames another one, or reports ranks missing at the rendezvous, its message is the cause.
        Some(words) if status == ExitKind::Code(EXIT_PEER_FAILED) || words.starts_with(&missing) => {
            let others = others.map(|others| format!("; {others}")).unwrap_or_default();
            format!("error: {words} (so says rank {rank}{others})")
        }
        Some(words) => format!("error: {headline}{aside}: {words}"),
        None => format!("error: {headline}{aside}"),
    });
    lines.join("\n")
}

#[cfg(test)]
mod tests;
