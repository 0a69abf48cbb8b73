//! The error type of this crate.

use std::fmt::Display;
use std::time::Duration;

use signal_hook::consts::SIGPIPE;

use crate::worker_failure::{EXIT_CHECKPOINTED, NodeName, WorkerFailure, signal_name};

/// An error of a job that a launcher has started.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The launchers of a job's nodes did not connect to each other.
    #[error("node {node}: the launchers of {nodes} nodes did not meet at {address} {detail}")]
    Nodes {
        /// This node.
        node: usize,
        /// Nodes expected.
        nodes: usize,
        /// The meeting point.
        address: String,
        /// Which nodes are missing, or the error of the last attempt.
        detail: String,
    },
    /// A launcher with the job's secret was refused, because it does not fit the others.
    #[error("node {node} was refused at {address}: {reason}")]
    NodeRefused {
        /// The node that was refused.
        node: usize,
        /// The meeting point.
        address: String,
        /// The reason.
        reason: String,
    },
    /// A node's launcher ended without a message, or its machine failed.
    #[error("{0} is gone: its launcher was killed, or cannot be reached any more; all ranks here have ended")]
    NodeGone(NodeName),
    /// A node's launcher sends nothing more, while the others wait for it.
    #[error(
        "{node} does not answer: nothing was heard of its launcher for {:.1} s, so that it stands still, or cannot be reached; \
         all ranks here have ended; a longer time-out can be set (--timeout, SpawnConfig::join_timeout)", silence.as_secs_f64()
    )]
    NodeSilent {
        /// The node.
        node: NodeName,
        /// How long nothing was received from it.
        silence: Duration,
    },
    /// A node's launcher ended the job.
    #[error("{node} ended the job: {reason}")]
    NodeStopped {
        /// The node.
        node: NodeName,
        /// The reason.
        reason: String,
    },
    /// A worker process failed. This is the first one that did; the others were ended after it.
    #[error(transparent)]
    Worker(#[from] Box<WorkerFailure>),
    /// The launcher was stopped by a signal, and has ended its workers.
    #[error("stopped by {}; all ranks have ended", signal_name(*signal))]
    Interrupted {
        /// The signal's number.
        signal: i32,
    },
    /// The workers were asked to stop and have written a checkpoint ([`EXIT_CHECKPOINTED`](crate::EXIT_CHECKPOINTED)).
    #[error("stopped with a checkpoint, from which the job goes on when it is started again to resume")]
    Checkpointed,
    /// An invalid argument; a port that is in use; a call of the operating system that failed.
    #[error(transparent)]
    Comm(#[from] comm::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the exit code for a program that ends with this error: 2 for an invalid argument, 128 plus the signal's number if
    /// a signal ended it, [`EXIT_CHECKPOINTED`] if it was stopped with a checkpoint, else 1.
    ///
    /// ```
    /// assert_eq!(launch::Error::Interrupted { signal: 2 }.exit_code(), 130);
    /// ```
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Interrupted { signal } => (128 + signal).clamp(1, 255) as u8,
            Error::Checkpointed => EXIT_CHECKPOINTED as u8,
            Error::Comm(error) => error.exit_code(),
            _ => 1,
        }
    }

    pub(crate) fn invalid(what: &str, got: impl Display, help: impl Into<String>) -> Self {
        comm::Error::invalid(what, got, help).into()
    }

    pub(crate) fn system(what: impl Into<String>, reason: impl Display) -> Self {
        comm::Error::system(what, reason).into()
    }

    /// Returns whether nothing reads this process's standard output any more (`SIGPIPE`): the error need not be printed then.
    pub fn is_unread_output(&self) -> bool {
        matches!(self, Error::Interrupted { signal: SIGPIPE })
    }
}
