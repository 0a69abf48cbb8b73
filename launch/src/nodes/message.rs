//! What the launchers of a job's nodes say to each other.

use comm::{ExitKind, NodeName, WorkerFailure};
use serde::{Deserialize, Serialize};

/// The longest message: the last lines of a rank, each character of them escaped.
pub(super) const LIMIT: usize = 512 << 10;

/// From a node's launcher to the first one's council.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// Nothing of an earlier round is left on this node, and its ranks can be started.
    Ready {
        host: String,
        local_world_size: usize,
        /// The first node's: where the ranks of this round are to meet.
        port: u16,
        /// The fewest ranks that go on where others are lost.
        elastic: Option<usize>,
        /// How often the ranks may be started again.
        #[serde(default)]
        max_restarts: usize,
    },
    /// The ranks have met, as one of this node has told: from then on some may be lost.
    Met {
        /// Those of all nodes that the others have left behind.
        without: Vec<usize>,
    },
    /// A rank has failed, and the others go on if they are enough.
    Lost {
        failure: WorkerFailure,
        /// As with [`Ending::Failed`].
        is_final: bool,
    },
    /// The process of this rank of the job, which this node has started, has ended, well or not; where ranks may be lost.
    HasEnded(usize),
    /// This rank has failed: what the others do is in vain.
    Failing { rank: usize, status: ExitKind },
    /// The last lines that a lost rank has written to standard error; before [`Word::Ended`], as they are all there only then.
    LastLines { rank: usize, lines: Vec<String> },
    /// All ranks of this node have ended.
    Ended(Ending),
    /// The connection to that launcher is gone. No launcher says this of itself.
    Gone,
    /// That launcher is given up: nothing was heard of it for so long. Nor does any say this.
    Silent { ms: u64 },
}

/// How a round ended on one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Ending {
    Done,
    Failed {
        failure: WorkerFailure,
        /// How long ago: clocks of several machines cannot be compared.
        ago_ms: u64,
        /// Starting the ranks again would change nothing.
        is_final: bool,
    },
    /// Something else ended it: a signal, a program that cannot be started.
    Stopped(String),
}

/// From the first node's council to a node's launcher.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Order {
    Start(Round),
    /// Another node's ranks have failed: these shall end, too.
    Stop,
    /// Ranks are lost, as this text tells, and the others go on.
    GoOn(String),
    /// Something else to be told to the user, which changes nothing for the ranks.
    Note(String),
    /// The process of this rank has ended: its launcher has seen it.
    HasEnded(usize),
    /// To the first node: this rank of another one has failed by itself, maybe before all have met.
    IsMissed {
        rank: usize,
        host: String,
    },
    /// All ranks are to be started again, for this reason.
    Again {
        reason: String,
        restart: usize,
        of: usize,
    },
    Over(Verdict),
}

/// What all ranks of a round share. Not `Debug`: it holds the secret.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Round {
    pub(crate) run_id: String,
    /// Only where the launchers were given none, all of them being on loopback: no other way would it be sent.
    pub(crate) secret: Option<String>,
    pub(crate) port: u16,
    /// Times that the ranks were started before.
    pub(crate) restart: usize,
    pub(crate) max_restarts: usize,
}

/// How the job ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Verdict {
    Done,
    /// The first cause, of whatever node.
    Failed(WorkerFailure),
    Stopped {
        node: NodeName,
        reason: String,
    },
    Gone(NodeName),
    /// Nothing was heard of a node's launcher for so long.
    Silent {
        node: NodeName,
        ms: u64,
    },
}
