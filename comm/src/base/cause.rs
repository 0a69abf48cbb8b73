//! Causes of failures, and their conversion to errors.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::base::fingerprint::Fingerprint;
use crate::base::members::Members;

/// Detail of a time-out of a rank that did not answer.
pub(crate) const NO_ANSWER: &str = "its process does not answer (stopped, or its host is gone)";

/// Characters of the reason that a program gives, at most.
const MAX_REASON: usize = 1000;
/// In place of a reason that has not arrived.
const REASON_ELSEWHERE: &str = "its own output tells why";

/// The cause of a group's failure, as ranks send it to each other; the same on every rank. Ranks are those of the
/// group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Cause {
    Died {
        rank: usize,
    },
    Left {
        rank: usize,
    },
    Stalled {
        rank: usize,
        detail: String,
    },
    Mismatch {
        odd_rank: usize,
        odd: Fingerprint,
        rank: usize,
        call: Fingerprint,
    },
    Protocol {
        rank: usize,
        detail: String,
    },
    Unreachable {
        rank: usize,
        by: usize,
        detail: String,
    },
    /// What one rank has sent does not arrive at another one.
    Link {
        from: usize,
        to: usize,
        detail: String,
    },
    /// The communication library (NCCL, MPI) has failed on a rank.
    Failed {
        rank: usize,
        detail: String,
    },
    /// The program of a rank cannot go on, for this reason.
    Program {
        rank: usize,
        /// Empty as long as only the rank has been reported.
        reason: String,
    },
    /// All ranks are in one call, and the communication library has not finished it within the time-out.
    Hung,
    /// Another group of the job has failed with this cause. Its ranks are those of the whole job.
    InJob {
        cause: Box<Cause>,
        /// The host of the rank that is to blame. May be empty.
        host: String,
    },
}

impl Cause {
    /// Returns the error of rank `own`, which was in `operation`. Its ranks are those of the whole job.
    pub(crate) fn to_error(
        &self,
        own: usize,
        operation: String,
        timeout: Duration,
        members: &Members,
        host: impl Fn(usize) -> String,
    ) -> Error {
        let world = |rank| members.world_rank(rank);
        match self.clone() {
            Cause::Died { rank } => Error::PeerDied { rank: world(rank), host: host(rank), operation },
            Cause::Left { rank } => Error::PeerLeft { rank: world(rank), host: host(rank), operation },
            Cause::Stalled { rank, detail } => {
                Error::Timeout { rank: world(rank), host: host(rank), operation, waited: timeout, detail }
            }
            Cause::Mismatch { odd_rank, odd, rank, call } => Error::Mismatch {
                odd_rank: world(odd_rank),
                odd_call: odd.to_string(),
                rank: world(rank),
                call: call.to_string() + &members.suffix(),
            },
            Cause::Protocol { rank, detail } => {
                Error::Protocol { rank: world(rank), host: host(rank), operation, detail }
            }
            Cause::Unreachable { rank, by, detail } => {
                Error::Unreachable { rank: world(rank), host: host(rank), operation, by: world(by), detail }
            }
            Cause::Link { from, to, detail } => Error::LinkStalled {
                from: world(from),
                from_host: host(from).into(),
                to: world(to),
                to_host: host(to).into(),
                operation,
                detail: detail.into(),
            },
            Cause::Failed { rank, detail } => {
                let (host, here) = (host(rank), rank == own);
                Error::Library { rank: world(rank), host, operation, detail, here }
            }
            Cause::Program { rank, reason } => {
                let reason = if reason.is_empty() { REASON_ELSEWHERE.into() } else { reason };
                Error::PeerFailed { rank: world(rank), reason }
            }
            Cause::Hung => Error::system(operation, hung_text(timeout)),
            Cause::InJob { cause, host } => {
                // An empty group, so that every rank keeps its number.
                let host: &dyn Fn(usize) -> String = &|_| host.clone();
                cause.to_error(world(own), operation, timeout, &Members::world(0), host)
            }
        }
    }

    /// Returns the rank that is to blame.
    pub(crate) fn rank(&self) -> Option<usize> {
        match self {
            Cause::Died { rank }
            | Cause::Left { rank }
            | Cause::Stalled { rank, .. }
            | Cause::Mismatch { odd_rank: rank, .. }
            | Cause::Protocol { rank, .. }
            | Cause::Unreachable { rank, .. }
            | Cause::Link { to: rank, .. }
            | Cause::Failed { rank, .. }
            | Cause::Program { rank, .. } => Some(*rank),
            Cause::Hung => None,
            Cause::InJob { cause, .. } => cause.rank(),
        }
    }

    /// Returns the rank that others have blamed although it has not ended: one that stands still, or cannot be understood or reached.
    pub(crate) fn blamed(&self) -> Option<usize> {
        match self {
            Cause::Stalled { rank, .. }
            | Cause::Protocol { rank, .. }
            | Cause::Unreachable { rank, .. }
            | Cause::Link { to: rank, .. } => Some(*rank),
            _ => None,
        }
    }

    /// Returns the cause with ranks mapped by `number`. `None` if a rank has no number, or if the cause makes no sense
    /// in another group.
    pub(crate) fn renumbered(&self, number: impl Fn(usize) -> Option<usize>) -> Option<Cause> {
        Some(match self.clone() {
            Cause::Died { rank } => Cause::Died { rank: number(rank)? },
            Cause::Left { rank } => Cause::Left { rank: number(rank)? },
            Cause::Stalled { rank, detail } => Cause::Stalled { rank: number(rank)?, detail },
            Cause::Protocol { rank, detail } => Cause::Protocol { rank: number(rank)?, detail },
            Cause::Failed { rank, detail } => Cause::Failed { rank: number(rank)?, detail },
            Cause::Program { rank, reason } => Cause::Program { rank: number(rank)?, reason },
            Cause::Unreachable { rank, by, detail } => {
                Cause::Unreachable { rank: number(rank)?, by: number(by)?, detail }
            }
            Cause::Link { from, to, detail } => Cause::Link { from: number(from)?, to: number(to)?, detail },
            Cause::Mismatch { .. } | Cause::Hung | Cause::InJob { .. } => return None,
        })
    }

    /// Returns the cause of a rank whose program cannot go on. A long reason is truncated.
    pub(crate) fn program(rank: usize, reason: &str) -> Cause {
        let mut chars = reason.chars().map(|c| if c.is_control() { ' ' } else { c });
        let mut text: String = chars.by_ref().take(MAX_REASON).collect();
        if chars.next().is_some() {
            text.push_str("...");
        }
        Cause::Program { rank, reason: text }
    }

    /// Whether this is the failure of a program whose reason is not known yet.
    pub(crate) fn lacks_reason(&self) -> bool {
        match self {
            Cause::Program { reason, .. } => reason.is_empty(),
            Cause::InJob { cause, .. } => cause.lacks_reason(),
            _ => false,
        }
    }

    /// Returns this cause, with its reason if it lacks one and one of `known` is the same failure.
    pub(crate) fn with_reason<'a>(self, known: impl IntoIterator<Item = &'a Cause>) -> Cause {
        if !self.lacks_reason() {
            return self;
        }
        let told = known.into_iter().find(|known| !known.lacks_reason() && known.is_same_program(&self));
        told.cloned().unwrap_or(self)
    }

    fn is_same_program(&self, other: &Cause) -> bool {
        match (self, other) {
            (Cause::Program { rank, .. }, Cause::Program { rank: theirs, .. }) => rank == theirs,
            (Cause::InJob { cause, .. }, Cause::InJob { cause: theirs, .. }) => cause.is_same_program(theirs),
            _ => false,
        }
    }
}

fn hung_text(timeout: Duration) -> String {
    let seconds = timeout.as_secs_f64();
    format!(
        "all ranks are in it, and the library that moves its data did not end it within {seconds:.1} s: a device, or a \
         connection between devices, is stuck, or the time-out is too short (--timeout, TcpConfig::timeout)"
    )
}
