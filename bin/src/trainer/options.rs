//! The options of checkpoints, which all training experiments share.

use std::path::{Path, PathBuf};

use clap::Args;
use comm::launch::restarts;
use training::{CheckpointConfig, Checkpoints};

use crate::error::{Error, Result};
use crate::file_error::FileError;
use crate::options::count;
use crate::outputs::check_folder;

/// What `--resume` without a value stands for.
const LATEST: &str = "latest";

/// Where a run keeps its checkpoints, and whether it goes on from one.
#[derive(Debug, Clone, Default, Args)]
pub struct CheckpointOptions {
    /// Folder to keep checkpoints in; the last two stay
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Steps from one checkpoint to the next [default: those of an epoch]
    #[arg(
        long,
        value_name = "STEPS",
        value_parser = count,
        allow_negative_numbers = true,
        requires = "checkpoint_dir",
        help_heading = "Checkpoints"
    )]
    pub checkpoint_every: Option<usize>,
    /// Go on from the latest checkpoint in --checkpoint-dir, or from the one given; from the beginning where there is none yet
    #[arg(
        long,
        value_name = "CHECKPOINT",
        num_args = 0..=1,
        default_missing_value = LATEST,
        requires = "checkpoint_dir",
        help_heading = "Checkpoints"
    )]
    pub resume: Option<PathBuf>,
}

impl CheckpointOptions {
    /// Checks the folder, before any work: that checkpoints can be written to it, and that no earlier run's would be lost.
    ///
    /// # Errors
    /// A folder that cannot be made or written; checkpoints in it, without `--resume`.
    pub fn check(&self) -> Result<()> {
        let Some(checkpoints) = self.open()? else { return Ok(()) };
        let dir = self.dir();
        check_folder(dir).map_err(|error| FileError::write(dir, error))?;
        if !self.resumes() && !checkpoints.list()?.is_empty() {
            let help =
                "it holds checkpoints of an earlier run; give --resume to go on from them, or another folder";
            let got = dir.display().to_string();
            return Err(Error::Option { option: "--checkpoint-dir", got, help: help.into() });
        }
        Ok(())
    }

    /// The folder's checkpoints, where one is given.
    pub(crate) fn open(&self) -> Result<Option<Checkpoints>> {
        let open = |dir: &PathBuf| {
            Checkpoints::open(CheckpointConfig { dir: dir.clone(), ..CheckpointConfig::default() })
        };
        Ok(self.checkpoint_dir.as_ref().map(open).transpose()?)
    }

    /// True where the run goes on from a checkpoint, if there is one: it was asked to, or its launcher has started it again.
    pub(crate) fn resumes(&self) -> bool {
        self.resume.is_some() || self.starts_again()
    }

    /// Started again after a failure, with a folder to go on from.
    fn starts_again(&self) -> bool {
        self.checkpoint_dir.is_some() && restarts() > 0
    }

    /// Whether to go on, and the checkpoint that was asked for: by its path, or by its name in the folder. A run that is
    /// started again goes on from the latest one, wherever it began.
    pub(crate) fn wanted(&self) -> Option<Option<PathBuf>> {
        if self.starts_again() {
            return Some(None);
        }
        let resume = self.resume.as_deref()?;
        let (here, there) = (resume.to_path_buf(), self.dir().join(resume));
        let found = if !here.exists() && there.exists() { there } else { here };
        Some(Some(found).filter(|_| resume != Path::new(LATEST)))
    }

    pub(crate) fn dir(&self) -> &Path {
        self.checkpoint_dir.as_deref().unwrap_or(Path::new("."))
    }
}
