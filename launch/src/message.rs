//! Messages between the launchers of a job.

use serde::{Deserialize, Serialize};

use crate::{ExitKind, NodeName, WorkerFailure};

/// Maximum message size in bytes: the last lines of a rank, each character of them escaped.
pub(super) const MAX_MESSAGE: usize = 512 << 10;

/// Message from a node's launcher to the coordinator of the first node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum NodeMessage {
    /// Nothing of an earlier round is left on this node, and its ranks can be started.
    Ready {
        host: String,
        local_world_size: usize,
        /// On the first node: the rendezvous port of this round.
        port: u16,
        /// Minimum number of ranks of an elastic job; `None` if the job is not elastic.
        elastic: Option<usize>,
        /// Maximum number of restarts.
        #[serde(default)]
        max_restarts: usize,
    },
    /// A rank of this node reports that the ranks have formed a group: from now on some may be lost.
    Met {
        /// Ranks of the job that the group excludes.
        without: Vec<usize>,
    },
    /// A rank has failed in an elastic job; the others continue if enough are left.
    Lost {
        failure: WorkerFailure,
        /// As with [`Ending::Failed`].
        is_final: bool,
    },
    /// The process of this rank, which this node has started, has ended, successfully or not. Only sent in elastic
    /// jobs.
    HasEnded(usize),
    /// This rank has failed, and the round cannot succeed any more.
    Failing { rank: usize, status: ExitKind },
    /// The last lines of a lost rank's standard error. Sent just before [`NodeMessage::Ended`], because they are complete only
    /// then.
    LastLines { rank: usize, lines: Vec<String> },
    /// All ranks of this node have ended.
    Ended(Ending),
    /// The connection to that launcher is closed. Generated locally, never sent.
    Gone,
    /// That launcher is given up after this long silence. Generated locally, never sent.
    Silent { ms: u64 },
}

/// How a round ended on one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Ending {
    Done,
    Failed {
        failure: WorkerFailure,
        /// How long ago it failed: the clocks of several machines cannot be compared.
        ago_ms: u64,
        /// Restarting the ranks would change nothing.
        is_final: bool,
    },
    /// Another reason ended it: a signal, a program that cannot be started.
    Stopped(String),
}

/// Order from the coordinator of the first node to a node's launcher.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Order {
    Start(Round),
    /// The ranks of another node have failed: end this node's ranks, too.
    Stop,
    /// Ranks are lost, as this text says, and the others continue.
    GoOn(String),
    /// A message for the user, without consequences for the ranks.
    Note(String),
    /// The process of this rank has ended; its own launcher has seen it.
    HasEnded(usize),
    /// Sent to the first node only: this rank of another node has failed by itself, perhaps before all ranks have
    /// joined.
    IsMissed {
        rank: usize,
        host: String,
    },
    /// All ranks are to be restarted, for this reason.
    Again {
        reason: String,
        restart: usize,
        of: usize,
    },
    Over(JobOutcome),
}

/// What all ranks of a round share. Not `Debug`: it holds the secret.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Round {
    pub(crate) run_id: String,
    /// `Some` only if no secret was configured. All launchers are on loopback then; a secret is never sent over a
    /// network.
    pub(crate) secret: Option<String>,
    /// Address of the first node at which the ranks meet, where `master_addr` is not that address alone.
    #[serde(default)]
    pub(crate) host: Option<String>,
    pub(crate) port: u16,
    /// Number of earlier starts of the ranks.
    pub(crate) restart: usize,
    pub(crate) max_restarts: usize,
}

/// How the job ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum JobOutcome {
    Done,
    /// The first cause, of any node.
    Failed(WorkerFailure),
    Stopped {
        node: NodeName,
        reason: String,
    },
    Gone(NodeName),
    /// Nothing was received from a node's launcher for this long.
    Silent {
        node: NodeName,
        ms: u64,
    },
}
