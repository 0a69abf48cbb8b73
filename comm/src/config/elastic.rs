//! Configuration of elastic groups, whose ranks may change while they run.

use std::path::PathBuf;

/// How a group may change while it runs: [`TcpConfig::elastic`](crate::TcpConfig::elastic).
///
/// Each rank then keeps one more listener, at which the others find it to form a new group.
/// [`TcpConfig::bind`](crate::TcpConfig::bind) must be one specific address of the host, not all of them (0.0.0.0).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elastic {
    /// File in which newcomers find the group. It is written by rank 0, and by the rank that takes its place, and is
    /// accessible to its owner only. Default: `None`, no newcomers.
    pub file: Option<PathBuf>,
    /// File in which a launcher lists the ranks whose processes it has seen end, one number per line. A rank that is
    /// merely unreachable counts as alive when the remaining ranks decide whether they are enough to go on. Default:
    /// `None`.
    pub ended: Option<PathBuf>,
    /// This process is a newcomer: it waits until the group that `file` names admits it
    /// ([`ElasticGroup::grow`](crate::ElasticGroup::grow)). [`TcpConfig::rank`](crate::TcpConfig::rank) is then its
    /// number in the job, one that no rank of the job has had, and
    /// [`TcpConfig::world_size`](crate::TcpConfig::world_size) is not used. Default: false.
    pub newcomer: bool,
}
