//! Elastic jobs: the remaining ranks continue when ranks fail.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use comm::{Error, Result};

/// Lets a job continue when ranks fail. The remaining ranks form a smaller group
/// ([`ElasticGroup::shrink`](comm::ElasticGroup::shrink)), which their program must call for; it finds
/// `GIRANDOLE_ELASTIC` and `GIRANDOLE_ELASTIC_MIN` in its environment.
///
/// A rank that fails after the ranks have formed a group ([`Tcp::connect`](comm::Tcp::connect)) counts as lost, and is
/// named in a warning. A rank that fails before that ends the job, because the others would wait for it. The job is
/// done when all remaining ranks are; if the last one that is still at work fails, the job fails, even if others have
/// ended well before. The report that the ranks have formed a group may arrive after the failure, from any rank on any
/// node. The launcher waits for it as long as the others may take to end by themselves
/// ([`SpawnConfig::failure_grace`](crate::SpawnConfig::failure_grace)).
///
/// On several nodes, every launcher but the first one may be lost as well, with its ranks and its machine. A launcher
/// that is stopped by a signal leaves the job. The first node's launcher decides for all, so the job ends with it; the
/// ranks of the first node may be lost like any others. After a launcher is lost there is no restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElasticJob {
    /// Minimum number of ranks, those included that are starting; with fewer the job fails. Default: 1.
    pub min: usize,
    /// Maximum number of ranks that are started in place of lost ones. They find `GIRANDOLE_NEWCOMER` in their
    /// environment, and their `RANK` numbers continue those of the first ranks. On one node only. Default: 0.
    pub replace: usize,
    /// How long excluded ranks, which the others have left out of the group
    /// ([`ElasticGroup::shrink`](comm::ElasticGroup::shrink)), and new ranks that have not joined may take to end. The
    /// time starts once all other ranks of their node have ended, at least one of them successfully. Then they are
    /// ended and named in a warning, and the job is done. For a rank that is still a member of the group the job waits
    /// however long it takes. Default: 1 s.
    pub finish: Duration,
}

impl Default for ElasticJob {
    fn default() -> Self {
        Self { min: 1, replace: 0, finish: Duration::from_secs(1) }
    }
}

/// Returns the minimum number of ranks of an elastic job, as set by the launcher of this process; `None` if no launcher
/// has started it, or if the launcher ends all ranks when one fails.
///
/// ```
/// assert_eq!(launch::elastic_min(), None);
/// ```
pub fn elastic_min() -> Option<usize> {
    comm::launcher::elastic_min()
}

/// A temporary folder of one job, removed on drop; if the launcher is killed, the reaper removes it.
pub(super) struct JobFolder(PathBuf);

impl JobFolder {
    /// Returns the path of the folder of the job with this id.
    pub(super) fn path(spawn_id: &str) -> PathBuf {
        std::env::temp_dir().join(format!("girandole-{spawn_id}"))
    }

    pub(super) fn new(spawn_id: &str) -> Result<Self> {
        let folder = Self::path(spawn_id);
        let made = DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|e| Error::system(format!("cannot make the folder {}", folder.display()), e))?;
        Ok(Self(folder))
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        Path::new(&self.0).join(name)
    }
}

impl Drop for JobFolder {
    fn drop(&mut self) {
        // If the folder cannot be removed, a leftover file does no harm.
        let _ = fs::remove_dir_all(&self.0);
    }
}
