//! Jobs that go on when ranks fail.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::SpawnConfig;
use super::environment::random_hex;
use crate::{Error, Result};

/// Lets a job go on when ranks fail: the others meet anew ([`Communicator::shrink`](crate::Communicator::shrink)), which their
/// program must do; they find `GIRANDOLE_ELASTIC` and `GIRANDOLE_ELASTIC_FILE` in their environment.
///
/// A rank that fails is then lost, and named in a warning. The job is done when all ranks that are left are; those that are
/// left behind once one has ended well are ended after [`SpawnConfig::grace`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElasticJob {
    /// The fewest ranks that go on; where fewer are left, the job fails. Default: 1.
    pub min: usize,
    /// Ranks that are started in place of lost ones, in all; they find `GIRANDOLE_NEWCOMER`, and a `RANK` that continues the
    /// others'. Default: 0.
    pub replace: usize,
}

impl Default for ElasticJob {
    fn default() -> Self {
        Self { min: 1, replace: 0 }
    }
}

impl ElasticJob {
    pub(super) fn check(&self, config: &SpawnConfig) -> Result<()> {
        if config.nodes > 1 {
            let help = "a job on several nodes cannot go on without some of its ranks; give max_restarts";
            return Err(Error::invalid("elastic", format!("{} nodes", config.nodes), help));
        }
        if self.min == 0 || self.min > config.world_size {
            let help = format!("the fewest ranks that go on: 1 to {}", config.world_size);
            return Err(Error::invalid("elastic", self.min, help));
        }
        Ok(())
    }
}

/// A folder of this job's own, gone when this is dropped.
pub(super) struct JobFolder(PathBuf);

impl JobFolder {
    pub(super) fn new() -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("girandole-{}", random_hex::<8>()?));
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
