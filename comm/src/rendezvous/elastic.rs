//! How a group may change while it runs.

use std::path::PathBuf;

/// How a group may change while it runs: [`TcpConfig::elastic`](crate::TcpConfig::elastic).
///
/// Each rank then listens at one more address, at which the others find it again. On a host with several addresses
/// [`TcpConfig::bind`](crate::TcpConfig::bind) must name one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elastic {
    /// A file that the first rank writes, and whoever takes its place: where ranks that come later find the group. It belongs
    /// to its owner alone. Default: `None`, and nobody comes later.
    pub file: Option<PathBuf>,
    /// A file in which a launcher notes the numbers of ranks whose processes it has seen end, one on each line: whatever cannot
    /// be reached otherwise counts as alive when the ranks that are left decide whether they are enough. Default: `None`.
    pub ended: Option<PathBuf>,
    /// This process comes later: it waits until the group that the file names lets it in
    /// ([`ElasticGroup::grow`](crate::ElasticGroup::grow)). [`TcpConfig::rank`](crate::TcpConfig::rank) is then the number by which
    /// it is told from all others, one that no rank of the job has had, and
    /// [`TcpConfig::world_size`](crate::TcpConfig::world_size) is of no account. Default: false.
    pub newcomer: bool,
}
