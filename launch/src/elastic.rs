//! Jobs that go on when ranks fail.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use comm::{Error, Result};

/// Lets a job go on when ranks fail: the others meet anew ([`ElasticGroup::shrink`](comm::ElasticGroup::shrink)), which their
/// program must do; they find `GIRANDOLE_ELASTIC` and `GIRANDOLE_ELASTIC_MIN` in their environment.
///
/// A rank that fails is then lost, and named in a warning, once the ranks have met ([`Tcp::connect`](comm::Tcp::connect)): one
/// that fails before that ends the job, as the others would wait for it. The job is done when all ranks that are left are. That
/// they have met may be heard after the failure, from any of them and on any node: it is waited for as long as the others may
/// take to end by themselves ([`SpawnConfig::grace`](crate::SpawnConfig::grace)).
///
/// On several nodes, each launcher but the first one may be lost as well, with its ranks, and so may its machine; one that a
/// signal stops leaves the job. The first one's council decides for all, so that the job ends with it; its ranks may be lost as
/// any others. Where a launcher is gone there is no restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElasticJob {
    /// The fewest ranks that go on; where fewer are left, the job fails. Default: 1.
    pub min: usize,
    /// Ranks that are started in place of lost ones, in all; they find `GIRANDOLE_NEWCOMER`, and a `RANK` that continues the
    /// others'. On one node only. Default: 0.
    pub replace: usize,
    /// How long ranks that the others have left behind ([`ElasticGroup::shrink`](comm::ElasticGroup::shrink)), and new ones
    /// that have not joined them, may take to end once all others of their node have ended, one of them well. Then they are
    /// ended, and named in a warning; the job is done. For a rank that is still at work the job waits however long it takes.
    /// Default: 1 s.
    pub finish: Duration,
}

impl Default for ElasticJob {
    fn default() -> Self {
        Self { min: 1, replace: 0, finish: Duration::from_secs(1) }
    }
}

/// The fewest ranks that go on when others are lost, as this process's launcher tells; `None` where no launcher has started it,
/// or one that ends all ranks when one fails.
///
/// ```
/// assert_eq!(launch::elastic_min(), None);
/// ```
pub fn elastic_min() -> Option<usize> {
    comm::launcher::elastic_min()
}

/// A folder of this job's own, gone when this is dropped; where the launcher is killed, the warden removes it.
pub(super) struct JobFolder(PathBuf);

impl JobFolder {
    /// Where that of a job is which has this id.
    pub(super) fn place(spawn_id: &str) -> PathBuf {
        std::env::temp_dir().join(format!("girandole-{spawn_id}"))
    }

    pub(super) fn new(spawn_id: &str) -> Result<Self> {
        let folder = Self::place(spawn_id);
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
        // A file that is left there is of no use to anybody.
        let _ = fs::remove_dir_all(&self.0);
    }
}
