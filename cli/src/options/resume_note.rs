//! Record of the checkpoint given to `--resume`: decides whether a restarted job begins with it again, or with a
//! later one of its own.

use std::io::Write;
use std::path::Path;

use launch::restarts;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use training::{Checkpoints, FileError};

use crate::error::Result;

/// File name of the note, in the checkpoint folder.
const NOTE_FILE: &str = "asked-for";

/// Written by rank 0 before the first step: each start of a job is a new process, possibly on another host.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ResumeNote {
    /// The launcher's name for the job, the same in all its starts. `torchrun` names every job `none` by default.
    job: String,
    /// The value of `--resume`, as typed.
    asked: String,
    /// The latest checkpoint in the folder at that time, from an earlier run.
    latest: Option<String>,
}

impl ResumeNote {
    fn new(checkpoints: &Checkpoints, asked: &Path, job: String) -> Result<Self> {
        let latest = checkpoints.mark()?;
        Ok(Self { job, asked: asked.to_string_lossy().into_owned(), latest })
    }
}

/// Whether this job was started before and has since written a checkpoint of its own.
pub(super) fn has_own_checkpoint(checkpoints: &Checkpoints, dir: &Path, asked: &Path) -> Result<bool> {
    let Some(job) = job().filter(|_| restarts() > 0) else { return Ok(false) };
    let own = ResumeNote::new(checkpoints, asked, job)?;
    // Without a note, the job ended before its first step.
    let Some(then) = read::<ResumeNote>(dir, NOTE_FILE)? else { return Ok(false) };
    Ok(then.job == own.job && then.asked == own.asked && then.latest != own.latest)
}

/// Records that this job begins with the requested checkpoint, if the job may be restarted.
pub(super) fn note(checkpoints: &Checkpoints, dir: &Path, asked: &Path) -> Result<()> {
    let Some(job) = job() else { return Ok(()) };
    write(dir, NOTE_FILE, &ResumeNote::new(checkpoints, asked, job)?)
}

pub(super) fn write(dir: &Path, name: &str, note: &impl Serialize) -> Result<()> {
    let path = dir.join(name);
    let write = || -> std::io::Result<()> {
        // With this prefix the next save removes the file, if this process ends before renaming it.
        let mut file = tempfile::Builder::new().prefix(Checkpoints::UNFINISHED).tempfile_in(dir)?;
        file.write_all(serde_json::to_string(note)?.as_bytes())?;
        file.persist(&path).map(drop).map_err(|error| error.error)
    };
    Ok(write().map_err(|error| FileError::write(&path, error))?)
}

pub(super) fn read<T: DeserializeOwned>(dir: &Path, name: &str) -> Result<Option<T>> {
    let path = dir.join(name);
    match training::internal::read_input(&path) {
        // Content that is no valid note was not written by this job.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::read(&path, error).into()),
    }
}

/// Returns the launcher's name for this job, if the launcher restarts failed ranks.
pub(super) fn job() -> Option<String> {
    let value = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    value("TORCHELASTIC_MAX_RESTARTS").filter(|most| most != "0")?;
    Some(value("TORCHELASTIC_RUN_ID").unwrap_or_default())
}
