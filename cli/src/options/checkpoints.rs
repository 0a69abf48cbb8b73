//! Checkpoint options, shared by all training experiments.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use launch::restarts;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};
use training::{CheckpointConfig, Checkpoints, Fallback};

use crate::error::{Error, Result};
use crate::interrupt::StopOnSignal;
use crate::options::{CommonOptions, count};
use crate::outputs::make_folder;

use super::{begin_note, resume_note};

/// The value of `--resume` if none is given.
const LATEST: &str = "latest";

/// Where a run keeps its checkpoints, and whether it goes on from one.
#[derive(Debug, Clone, Default, Args)]
pub struct CheckpointOptions {
    /// Folder for checkpoints; the last two are kept
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Steps from one checkpoint to the next [default: those of an epoch; 20 without epochs; 1/10 of all for language models]
    #[arg(long, value_name = "STEPS", value_parser = count, requires = "checkpoint_dir", help_heading = "Checkpoints")]
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
    /// Also stop with a checkpoint on this signal, as on SIGTERM
    ///
    /// With --checkpoint-dir, SIGTERM stops the run after the step in work, with a checkpoint and exit code 85. Slurm, for example, sends
    /// another one some time before the end (--signal=USR1@60).
    #[arg(
        long,
        value_enum,
        value_name = "SIGNAL",
        ignore_case = true,
        requires = "checkpoint_dir",
        help_heading = "Checkpoints"
    )]
    pub stop_on: Option<UserSignal>,
}

/// A signal whose meaning is a program's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UserSignal {
    /// SIGUSR1.
    #[value(name = "USR1", alias = "SIGUSR1")]
    Usr1,
    /// SIGUSR2.
    #[value(name = "USR2", alias = "SIGUSR2")]
    Usr2,
}

impl UserSignal {
    fn number(self) -> i32 {
        match self {
            Self::Usr1 => SIGUSR1,
            Self::Usr2 => SIGUSR2,
        }
    }
}

/// Identifies a checkpoint for all ranks. Not by path, which need not be UTF-8 and so cannot be serialized.
#[derive(Serialize, Deserialize)]
pub(crate) enum CheckpointRef {
    /// By its name in the checkpoint folder.
    Named(String),
    /// The one given to `--resume`, outside that folder.
    Asked,
}

impl CheckpointOptions {
    /// Checks the folder before any work: that checkpoints can be written to it, that no other run does so, and that it
    /// holds none of an earlier run.
    ///
    /// # Errors
    /// A folder that cannot be created or written, or that another run uses; checkpoints in it, without `--resume`.
    pub fn check(&self) -> Result<()> {
        self.check_folder()?;
        let Some(checkpoints) = self.open()? else { return Ok(()) };
        // Given up at once: the ranks claim it.
        checkpoints.claim()?;
        if self.resume.is_some() {
            return Ok(());
        }
        if !checkpoints.list()?.is_empty()
            && !begin_note::is_of_a_restarted_job(self.dir(), begin_note::CHECKPOINTS)?
        {
            begin_note::refuse(self.dir(), begin_note::CHECKPOINTS)?;
            let help =
                "it holds checkpoints of an earlier run; give --resume to go on from them, or another folder";
            let got = self.dir().display().to_string();
            return Err(Error::Option { option: "--checkpoint-dir", got, help: help.into() });
        }
        begin_note::write(self.dir(), begin_note::CHECKPOINTS)
    }

    /// Checks only that checkpoints can be written to the folder.
    ///
    /// # Errors
    /// A folder that cannot be created or written.
    pub(crate) fn check_folder(&self) -> Result<()> {
        Ok(self.checkpoint_dir.as_deref().map_or(Ok(()), make_folder)?)
    }

    /// Whether checkpoints are written at all.
    pub fn keeps(&self) -> bool {
        self.checkpoint_dir.is_some()
    }

    /// Makes signals stop this rank's run with a checkpoint from now on, if it keeps any.
    pub(crate) fn stop_on_signal(&self) -> Option<StopOnSignal> {
        let signals = || [SIGTERM].into_iter().chain(self.stop_on.map(UserSignal::number)).collect();
        self.keeps().then(|| StopOnSignal::new(signals()))
    }

    /// Opens the checkpoint folder, if one is given.
    pub(crate) fn open(&self) -> Result<Option<Checkpoints>> {
        let Some(dir) = &self.checkpoint_dir else { return Ok(None) };
        if !dir.exists() {
            make_folder(dir)?;
        }
        Ok(Some(Checkpoints::open(CheckpointConfig { dir: dir.clone(), ..CheckpointConfig::default() })?))
    }

    /// Whether the run resumes from a checkpoint, if there is one: by `--resume`, or because its launcher has
    /// restarted it.
    pub fn resumes(&self) -> bool {
        self.resume.is_some() || self.starts_again()
    }

    /// Whether there is a checkpoint to resume from; it is not read, and may be damaged.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub(crate) fn has_checkpoint_to_resume(&self) -> Result<bool> {
        if self.asked().is_some() {
            return Ok(true);
        }
        let checkpoints = if self.resumes() { self.open()? } else { None };
        Ok(checkpoints.map(|checkpoints| checkpoints.list()).transpose()?.is_some_and(|all| !all.is_empty()))
    }

    /// Returns the checkpoint given to `--resume`; `None` for the latest.
    fn asked(&self) -> Option<&Path> {
        self.resume.as_deref().filter(|resume| *resume != Path::new(LATEST))
    }

    /// The same, but `None` once a restarted run has written a checkpoint itself.
    fn asked_still(&self, checkpoints: &Checkpoints) -> Result<Option<&Path>> {
        let Some(asked) = self.asked() else { return Ok(None) };
        let has_own = resume_note::has_own_checkpoint(checkpoints, self.dir(), asked)?;
        Ok(Some(asked).filter(|_| !has_own))
    }

    /// Whether the run was restarted after a failure, and has a checkpoint folder.
    fn starts_again(&self) -> bool {
        self.checkpoint_dir.is_some() && restarts() > 0
    }

    /// Returns the checkpoint to resume from, if resuming is requested and one exists: `latest` reads the latest one,
    /// `one` that in a folder. A restarted run resumes from the one given to `--resume` until it has written one
    /// itself.
    ///
    /// # Errors
    /// A damaged checkpoint.
    pub fn choose<T>(
        &self,
        latest: impl FnOnce(&Checkpoints) -> training::Result<Option<T>>,
        one: impl FnOnce(&Checkpoints, &Path) -> training::Result<T>,
    ) -> Result<Option<T>> {
        let (true, Some(checkpoints)) = (self.resumes(), self.open()?) else { return Ok(None) };
        let Some(asked) = self.asked_still(&checkpoints)? else {
            return latest(&checkpoints).map_err(with_fallback_hint);
        };
        let folder = self.folder(asked);
        self.refuse_missing(asked, &folder, &checkpoints)?;
        refuse_parent(asked, &folder)?;
        let found = one(&checkpoints, &folder).map_err(with_fallback_hint)?;
        resume_note::note(&checkpoints, self.dir(), asked)?;
        Ok(Some(found))
    }

    /// Rejects a folder that does not exist, and lists the existing checkpoints.
    fn refuse_missing(&self, asked: &Path, folder: &Path, checkpoints: &Checkpoints) -> Result<()> {
        // If existence cannot be determined, reading the checkpoint reports the error.
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

    /// Returns a reference to a chosen checkpoint, for ranks with the same options.
    pub(crate) fn to_ref(&self, chosen: &Path) -> CheckpointRef {
        let name = chosen.file_name().and_then(|name| name.to_str());
        match name.filter(|_| chosen.parent() == Some(self.dir())) {
            Some(name) => CheckpointRef::Named(name.into()),
            None => CheckpointRef::Asked,
        }
    }

    /// Returns the folder of a referenced checkpoint.
    pub(crate) fn folder_of(&self, place: &CheckpointRef) -> PathBuf {
        match place {
            CheckpointRef::Named(name) => self.dir().join(name),
            CheckpointRef::Asked => self.folder(self.resume.as_deref().unwrap_or(Path::new(""))),
        }
    }

    /// Returns the folder that a run resumes from: that of the checkpoint given to `--resume`, unless that is in the run's own
    /// folder, or the run has written one itself since.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub(crate) fn resumed_folder(&self) -> Result<PathBuf> {
        let asked = match self.open()? {
            Some(checkpoints) => self.asked_still(&checkpoints)?,
            None => None,
        };
        let outside = asked.map(|asked| self.folder(asked)).filter(|it| it.parent() != Some(self.dir()));
        Ok(outside.unwrap_or_else(|| self.dir().to_path_buf()))
    }

    /// Returns the option that names the checkpoint to resume from, and its value.
    pub fn source(&self) -> (&'static str, &Path) {
        match self.asked() {
            Some(resume) => ("--resume", resume),
            None => ("--checkpoint-dir", self.dir()),
        }
    }

    /// Returns a checkpoint's folder, given by path, or by name in the checkpoint folder.
    fn folder(&self, asked: &Path) -> PathBuf {
        let (here, there) = (asked.to_path_buf(), self.dir().join(asked));
        if !here.exists() && there.exists() { there } else { here }
    }

    /// Returns the folder of checkpoints; the current one where none is given.
    pub fn dir(&self) -> &Path {
        self.checkpoint_dir.as_deref().unwrap_or(Path::new("."))
    }
}

/// Rejects a folder of checkpoints where a single checkpoint is expected.
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

/// Adds to the error of a damaged checkpoint how to resume from the one before it.
pub(crate) fn with_fallback_hint(error: impl Into<Error>) -> Error {
    let error = error.into();
    let Some(Fallback(Some(folder))) = error.fallback_checkpoint() else { return error };
    let help = format!("--resume={} goes on from it", folder.display());
    Error::Damaged { source: Box::new(error), help }
}

/// Whether a run keeps its losses: for its own report, or for the report of a run resumed from its checkpoints.
pub(crate) fn keeps_losses(common: &CommonOptions, checkpoints: &CheckpointOptions) -> bool {
    common.report.is_some() || checkpoints.keeps()
}
