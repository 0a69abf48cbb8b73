//! The options of checkpoints, which all training experiments share.

use std::path::{Path, PathBuf};

use clap::Args;
use launch::restarts;
use serde::{Deserialize, Serialize};
use training::{CheckpointConfig, Checkpoints, Fallback};

use crate::error::{Error, Result};
use crate::file_error::FileError;
use crate::options::{CommonOptions, count};
use crate::outputs::check_folder;

use super::asked;

/// What `--resume` without a value stands for.
const LATEST: &str = "latest";

/// Where a run keeps its checkpoints, and whether it goes on from one.
#[derive(Debug, Clone, Default, Args)]
pub struct CheckpointOptions {
    /// Folder for checkpoints; the last two are kept
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Steps from one checkpoint to the next [default: those of an epoch, or 20 without epochs]
    #[arg(
        long,
        value_name = "STEPS",
        value_parser = count,
        allow_negative_numbers = true,
        requires = "checkpoint_dir",
        help_heading = "Checkpoints"
    )]
    pub checkpoint_every: Option<usize>,
    /// Continue from the latest checkpoint in --checkpoint-dir, or from the one given; start from the beginning if there is none yet
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

/// A checkpoint that all ranks can find. Not its path, which need not be UTF-8 and so cannot be sent as it is.
#[derive(Serialize, Deserialize)]
pub(crate) enum CheckpointRef {
    /// In the folder, by its name.
    Named(String),
    /// The one that was asked for, somewhere else.
    Asked,
}

impl CheckpointOptions {
    /// Checks the folder, before any work: that checkpoints can be written to it, and that no earlier run's would be lost.
    ///
    /// # Errors
    /// A folder that cannot be made or written; checkpoints in it, without `--resume`.
    pub fn check(&self) -> Result<()> {
        self.check_folder()?;
        let Some(checkpoints) = self.open()? else { return Ok(()) };
        if !self.resumes() && !checkpoints.list()?.is_empty() {
            let help =
                "it holds checkpoints of an earlier run; give --resume to go on from them, or another folder";
            let got = self.dir().display().to_string();
            return Err(Error::Option { option: "--checkpoint-dir", got, help: help.into() });
        }
        Ok(())
    }

    /// Checks only that checkpoints can be written to the folder.
    ///
    /// # Errors
    /// A folder that cannot be made or written.
    pub(crate) fn check_folder(&self) -> Result<()> {
        if self.open()?.is_none() {
            return Ok(());
        }
        let dir = self.dir();
        Ok(check_folder(dir).map_err(|error| FileError::write(dir, error))?)
    }

    /// Whether checkpoints are kept at all.
    pub fn keeps(&self) -> bool {
        self.checkpoint_dir.is_some()
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

    /// True where there is a checkpoint to go on from; it is not read, and may be damaged. Also where the launcher has started the run
    /// again, which may have come to its end.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub(crate) fn goes_on(&self) -> Result<bool> {
        if restarts() > 0 || self.asked().is_some() {
            return Ok(true);
        }
        let checkpoints = if self.resumes() { self.open()? } else { None };
        Ok(checkpoints.map(|checkpoints| checkpoints.list()).transpose()?.is_some_and(|all| !all.is_empty()))
    }

    /// The checkpoint that is asked for and is not the latest.
    fn asked(&self) -> Option<&Path> {
        self.resume.as_deref().filter(|resume| *resume != Path::new(LATEST))
    }

    /// Started again after a failure, with a folder to go on from.
    fn starts_again(&self) -> bool {
        self.checkpoint_dir.is_some() && restarts() > 0
    }

    /// The checkpoint to go on from, if that is asked for and there is one: `latest` reads the latest one, `one` that in a
    /// folder. A run that is started again goes on from the one that it was asked for until it has written one itself.
    ///
    /// # Errors
    /// One that is damaged.
    pub(crate) fn choose<T>(
        &self,
        latest: impl FnOnce(&Checkpoints) -> training::Result<Option<T>>,
        one: impl FnOnce(&Checkpoints, &Path) -> training::Result<T>,
    ) -> Result<Option<T>> {
        let (true, Some(checkpoints)) = (self.resumes(), self.open()?) else { return Ok(None) };
        let Some(asked) = self.asked() else { return latest(&checkpoints).map_err(offer) };
        if asked::is_behind(&checkpoints, self.dir(), asked)? {
            return latest(&checkpoints).map_err(offer);
        }
        let folder = self.folder(asked);
        self.refuse_missing(asked, &folder, &checkpoints)?;
        refuse_parent(asked, &folder)?;
        let found = one(&checkpoints, &folder).map_err(offer)?;
        asked::note(&checkpoints, self.dir(), asked)?;
        Ok(Some(found))
    }

    /// Refuses a folder that is not there, and says what is.
    fn refuse_missing(&self, asked: &Path, folder: &Path, checkpoints: &Checkpoints) -> Result<()> {
        // What cannot be looked at is told by who reads it.
        if folder.try_exists().unwrap_or(true) {
            return Ok(());
        }
        let dir = self.dir().display();
        let found = checkpoints.list()?;
        let names: Vec<_> =
            found.iter().filter_map(|folder| folder.file_name()).map(|name| name.to_string_lossy()).collect();
        let help = match &names[..] {
            [] => format!("there is no such folder, and no checkpoint in {dir}"),
            all => format!("there is no such folder; {dir} holds {}", all.join(", ")),
        };
        Err(Error::Option { option: "--resume", got: asked.display().to_string(), help })
    }

    /// Where a checkpoint is that was chosen, for ranks with the same options.
    pub(crate) fn place(&self, chosen: &Path) -> CheckpointRef {
        let name = chosen.file_name().and_then(|name| name.to_str());
        match name.filter(|_| chosen.parent() == Some(self.dir())) {
            Some(name) => CheckpointRef::Named(name.into()),
            None => CheckpointRef::Asked,
        }
    }

    /// The folder of that checkpoint.
    pub(crate) fn at(&self, place: &CheckpointRef) -> PathBuf {
        match place {
            CheckpointRef::Named(name) => self.dir().join(name),
            CheckpointRef::Asked => self.folder(self.resume.as_deref().unwrap_or(Path::new(""))),
        }
    }

    /// The option that names what is gone on from, and its value.
    pub(crate) fn source(&self) -> (&'static str, &Path) {
        match self.asked() {
            Some(resume) => ("--resume", resume),
            None => ("--checkpoint-dir", self.dir()),
        }
    }

    /// A checkpoint by its path, or by its name in the folder.
    fn folder(&self, asked: &Path) -> PathBuf {
        let (here, there) = (asked.to_path_buf(), self.dir().join(asked));
        if !here.exists() && there.exists() { there } else { here }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.checkpoint_dir.as_deref().unwrap_or(Path::new("."))
    }
}

/// Refuses a folder that holds checkpoints where one of them is meant.
fn refuse_parent(asked: &Path, folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    let config = CheckpointConfig { dir: folder.to_path_buf(), ..CheckpointConfig::default() };
    let Some(newest) = Checkpoints::open(config)?.list()?.pop() else { return Ok(()) };
    let help = format!(
        "this folder holds checkpoints but is not a checkpoint: give one of them, such as {}; --resume alone takes the latest in --checkpoint-dir",
        newest.display()
    );
    Err(Error::Option { option: "--resume", got: asked.display().to_string(), help })
}

/// Says how the checkpoint before a damaged one is taken.
pub(crate) fn offer(error: impl Into<Error>) -> Error {
    let error = error.into();
    let Some(Fallback(Some(folder))) = error.instead() else { return error };
    let help = format!("--resume={} goes on from it", folder.display());
    Error::Damaged { source: Box::new(error), help }
}

/// Whether a run keeps its losses: for its own report, or for that of a run that goes on from its checkpoints.
pub(crate) fn keeps_losses(common: &CommonOptions, checkpoints: &CheckpointOptions) -> bool {
    common.report.is_some() || checkpoints.keeps()
}
