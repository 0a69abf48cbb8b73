//! Where a run began: the checkpoints that were there before it are not its own.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};
use training::Checkpoints;
use training::build::Model;

use super::{CheckpointPlan, Trainer};
use crate::{Error, Result};

/// Where a run began, so that it never goes back to a checkpoint that it has neither written nor begun from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Origin {
    /// The checkpoint that it has resumed from: its name in the folder of checkpoints, or a path.
    #[serde(serialize_with = "lossy")]
    pub(super) resumed: Option<PathBuf>,
    /// [`Checkpoints::mark`] of the folder by then, which is another one as soon as the run has written a checkpoint.
    pub(super) mark: Option<String>,
}

impl Origin {
    /// Of a run that begins now.
    pub(super) fn now(checkpoints: &Checkpoints, dir: &Path, resumed: Option<&Path>) -> Result<Self> {
        let name = |folder: &Path| match folder.strip_prefix(dir) {
            Ok(name) => Ok(name.to_path_buf()),
            Err(_) => std::path::absolute(folder).map_err(|error| Error::file(folder, error)),
        };
        Ok(Self { resumed: resumed.map(name).transpose()?, mark: checkpoints.mark()? })
    }
}

/// Only new ranks use what they are told, and a path that is no text is an error there.
fn lossy<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

impl<M: Model> Trainer<'_, M> {
    /// Notes where the run begins, if it keeps checkpoints.
    pub(super) fn begin_from(&mut self, resumed: Option<&Path>) -> Result<()> {
        if let (Some(folder), Some(CheckpointPlan { dir, .. })) =
            (&self.checkpoints.folder, &self.config.checkpoints)
        {
            self.checkpoints.origin = Origin::now(folder, dir, resumed)?;
        }
        Ok(())
    }
}
