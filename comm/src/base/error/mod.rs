//! The error type of this crate.

mod candle;

use std::sync::Arc;
use std::time::Duration;

pub use candle::{carried, carried_as, carry};

/// Exit code of a worker that ends only because another rank failed (`EX_TEMPFAIL` of `sysexits.h`). A launcher looks
/// for the first cause among the other ranks.
pub const EXIT_PEER_FAILED: i32 = 75;

/// An error of communication between ranks. Failures of the transport name ranks by their number
/// in the whole job, even if the call was in a subgroup. Mistakes of the caller name them by their number in the group,
/// except for a value that cannot be encoded, which is reported to every rank by the number in the job. Errors are
/// `Clone`: a group that has failed returns the same cause from every later call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- mistakes of the caller: the group stays usable ----
    /// An argument of a call or a field of a configuration cannot be used.
    #[error("{what}: got {got}; {help}")]
    InvalidArgument {
        /// The argument, field or environment variable.
        what: String,
        /// The value as it was given.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// A rank that does not exist in the group.
    #[error("{operation}: rank {rank} does not exist in a group of {world_size}; ranks go from 0 to {}", world_size - 1)]
    RankOutOfRange {
        /// The call.
        operation: String,
        /// The rank that was given.
        rank: usize,
        /// Ranks in the group, at least 1.
        world_size: usize,
    },
    /// The operation is not defined for tensors of this dtype.
    #[error("{operation}: dtype {dtype:?} is not supported; {help}")]
    UnsupportedDtype {
        /// The call.
        operation: String,
        /// The tensor's dtype.
        dtype: candle_core::DType,
        /// The dtypes that are supported.
        help: String,
    },
    /// Input and output of one call do not match.
    #[error("{operation}: {what} has {got} elements, expected {expected}")]
    ElementCount {
        /// The call.
        operation: String,
        /// Which tensor.
        what: &'static str,
        /// Elements it should have.
        expected: usize,
        /// Elements it has.
        got: usize,
    },
    /// A candle operation on one of the tensors failed.
    #[error("{operation}: {source}")]
    Tensor {
        /// The call.
        operation: String,
        /// Candle's error.
        source: Arc<candle_core::Error>,
    },
    /// An address other than loopback is used without a secret. Every job needs one there.
    #[error(
        "refusing to use the address {address} without a secret: set GIRANDOLE_SECRET_FILE to a file of mode 0600 \
         that holds 64 hexadecimal digits, the same on every host"
    )]
    NoSecret {
        /// The address that is not loopback.
        address: String,
    },

    // ---- rendezvous ----
    /// The address of the meeting point is in use.
    #[error("cannot listen on {address}: {reason}; choose another port or end the program that holds it")]
    Listen {
        /// The address.
        address: String,
        /// The operating system's reason.
        reason: String,
    },
    /// Not all ranks have connected in time.
    #[error("rank {rank}: the group of {world_size} did not meet at {address} within {:.1} s: {detail}", waited.as_secs_f64())]
    Rendezvous {
        /// This rank.
        rank: usize,
        /// Ranks expected.
        world_size: usize,
        /// The meeting point.
        address: String,
        /// Time spent.
        waited: Duration,
        /// Which ranks are missing, or the error of the last attempt.
        detail: String,
    },
    /// A rank with the job's secret was refused, because it does not fit the group.
    #[error("rank {rank} was refused at {address}: {reason}")]
    Refused {
        /// The rank that was refused.
        rank: usize,
        /// The meeting point.
        address: String,
        /// The reason.
        reason: String,
    },

    // ---- failures of the transport: the group can no longer be used ----
    /// A rank's process ended, or its connection broke.
    #[error("rank {rank} (host {host}) died during {operation}")]
    PeerDied {
        /// The rank that is gone.
        rank: usize,
        /// Its host name.
        host: String,
        /// What this rank was doing.
        operation: String,
    },
    /// A rank closed its group while others still needed it.
    #[error(
        "rank {rank} (host {host}) left the group before {operation} was done: it ended its part, or failed for a \
         reason of its own that its own output tells"
    )]
    PeerLeft {
        /// The rank that left.
        rank: usize,
        /// Its host name.
        host: String,
        /// What this rank was doing.
        operation: String,
    },
    /// A rank's program could not go on, and said why ([`Communicator::announce_failure`](crate::Communicator::announce_failure)).
    #[error("rank {rank} could not go on: {reason}")]
    PeerFailed {
        /// The rank.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// A rank did not take part in time.
    #[error(
        "rank {rank} (host {host}) did not take part in {operation} within {:.1} s: {detail}; a longer time-out can be \
         set (--timeout, TcpConfig::timeout)", waited.as_secs_f64()
    )]
    Timeout {
        /// The rank waited for.
        rank: usize,
        /// Its host name.
        host: String,
        /// The operation that waited.
        operation: String,
        /// How long it has waited.
        waited: Duration,
        /// What is known of the rank: that it does not answer, or what it is doing instead.
        detail: String,
    },
    /// This rank's communicator was aborted or dropped before the operation was done.
    #[error(
        "{operation} was aborted: this rank called `abort`, or dropped its communicator while nothing came from the others"
    )]
    Aborted {
        /// The call, or the group if the call was made after the end.
        operation: String,
    },
    /// A rank is alive, but no connection to it can be made.
    #[error(
        "rank {rank} (host {host}) cannot be reached from rank {by} for {operation}: {detail}; every rank must be able to \
         connect to every other: look for a firewall, and for GIRANDOLE_BIND (TcpConfig::bind) on the host {host}"
    )]
    Unreachable {
        /// The rank to connect to.
        rank: usize,
        /// Its host name.
        host: String,
        /// What this rank was doing.
        operation: String,
        /// The rank that tried to connect.
        by: usize,
        /// The error, with the address.
        detail: String,
    },
    /// What one rank has sent to another does not arrive, though the connection was made.
    #[error(
        "the connection from rank {from} (host {from_host}) to rank {to} (host {to_host}) stands still in {operation}: {detail}"
    )]
    LinkStalled {
        /// The rank that has sent something.
        from: usize,
        /// Its host name.
        from_host: Box<str>,
        /// The rank at which nothing arrives.
        to: usize,
        /// Its host name.
        to_host: Box<str>,
        /// What this rank was doing.
        operation: String,
        /// Both addresses, what waits and for how long, and the likely cause.
        detail: Box<str>,
    },
    /// Ranks called different operations at the same position in their sequence of calls.
    #[error(
        "the ranks do not agree on the call: rank {odd_rank} called {odd_call}, rank {rank} called {call}; every rank \
         must make the same calls, in the same order, with the same dtype and element count"
    )]
    Mismatch {
        /// The rank that differs from most; with two ranks, the higher one. For `all_to_all_v`, the higher one of two whose
        /// counts differ: either may be wrong.
        odd_rank: usize,
        /// Its call.
        odd_call: String,
        /// A rank whose call it differs from.
        rank: usize,
        /// That rank's call.
        call: String,
    },
    /// A rank violated the protocol.
    #[error("rank {rank} (host {host}) broke the protocol during {operation}: {detail}")]
    Protocol {
        /// The rank.
        rank: usize,
        /// Its host name.
        host: String,
        /// What this rank was doing.
        operation: String,
        /// What was wrong.
        detail: String,
    },
    /// The communication library that moves the data, such as NCCL or MPI, has failed on a rank.
    #[error("{operation}: on rank {rank} (host {host}), {detail}")]
    Library {
        /// The rank on which it has failed.
        rank: usize,
        /// Its host name.
        host: String,
        /// What this rank was doing.
        operation: String,
        /// The library's error.
        detail: String,
        /// Whether it has failed on this rank.
        here: bool,
    },
    /// The other ranks have formed a new group without this rank.
    #[error(
        "rank {rank} is excluded: it did not come in time when the ranks that were left formed a new group, which has gone \
         on without it; end this process, and start a new one that joins"
    )]
    Excluded {
        /// This rank.
        rank: usize,
    },
    /// The remaining ranks did not form a new group in time.
    #[error("rank {rank}: no new group was formed within {:.1} s: {detail}", waited.as_secs_f64())]
    Regroup {
        /// This rank.
        rank: usize,
        /// Time spent.
        waited: Duration,
        /// Which ranks did not come, or the error of the last attempt.
        detail: String,
    },
    /// A system call or another operation of this process failed.
    #[error("{what}: {reason}")]
    System {
        /// What was attempted.
        what: String,
        /// The reason.
        reason: String,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns whether another rank is at fault, and this process only noticed the failure. A program that ends for
    /// such a reason exits with [`crate::EXIT_PEER_FAILED`], so that its launcher looks for the first cause elsewhere.
    ///
    /// ```
    /// let died = comm::Error::PeerDied { rank: 1, host: "a".into(), operation: "barrier #3".into() };
    /// assert!(died.is_peer_failure());
    /// ```
    pub fn is_peer_failure(&self) -> bool {
        self.is_loss()
            || matches!(
                self,
                Error::Mismatch { .. }
                    | Error::Library { here: false, .. }
                    | Error::Excluded { .. }
                    | Error::Regroup { .. }
            )
    }

    /// Returns whether a rank is lost, and the others can go on without it ([`shrink`](crate::ElasticGroup::shrink)).
    ///
    /// ```
    /// let died = comm::Error::PeerDied { rank: 1, host: "a".into(), operation: "barrier #3".into() };
    /// assert!(died.is_loss());
    /// ```
    pub fn is_loss(&self) -> bool {
        matches!(
            self,
            Error::PeerDied { .. }
                | Error::PeerLeft { .. }
                | Error::PeerFailed { .. }
                | Error::Timeout { .. }
                | Error::Unreachable { .. }
                | Error::LinkStalled { .. }
                | Error::Protocol { .. }
        )
    }

    /// Returns the exit code for a program that ends with this error: 2 for an invalid argument,
    /// [`EXIT_PEER_FAILED`](crate::EXIT_PEER_FAILED) if another rank is at fault, else 1.
    ///
    /// ```
    /// assert_eq!(comm::Error::Excluded { rank: 1 }.exit_code(), 75);
    /// ```
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::InvalidArgument { .. } => 2,
            error if error.is_peer_failure() => EXIT_PEER_FAILED as u8,
            _ => 1,
        }
    }

    #[doc(hidden)]
    pub fn system(what: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        Error::System { what: what.into(), reason: reason.to_string() }
    }

    #[doc(hidden)]
    pub fn invalid(what: impl Into<String>, got: impl std::fmt::Display, help: impl Into<String>) -> Self {
        Error::InvalidArgument { what: what.into(), got: got.to_string(), help: help.into() }
    }

    /// Returns the error of a backend that does not support changing the ranks of a group.
    pub(crate) fn not_elastic(what: &str, backend: &str) -> Self {
        let got = format!("a group of the backend {backend}");
        Error::invalid(what, got, "its ranks cannot change; use tcp (comm::Tcp)")
    }
}
