//! Record of the job that began to write to a folder: what a job has refused at its first start it must not accept when its
//! launcher starts it again, and what it has written itself it must not refuse.

use std::io::ErrorKind;
use std::path::Path;

use launch::restarts;
use training::FileError;

use crate::error::Result;

use super::resume_note;

/// File name of the record.
const FILE: &str = "begun-by";
/// The name that `torchrun` gives every job by default.
const NAMELESS: &str = "none";

/// Records that this job writes to the folder, if its launcher may start it again.
pub(crate) fn write(folder: &Path) -> Result<()> {
    resume_note::job().map_or(Ok(()), |job| resume_note::write(folder, FILE, &job))
}

/// Whether this job was started again, and has written to the folder before.
pub(crate) fn is_of_a_restarted_job(folder: &Path) -> Result<bool> {
    if restarts() == 0 {
        return Ok(false);
    }
    let begun: Option<String> = resume_note::read(folder, FILE)?;
    Ok(begun.is_some() && begun == resume_note::job())
}

/// Makes sure that this job, which refuses the folder, does not take the record of another one for its own.
pub(crate) fn refuse(folder: &Path) -> Result<()> {
    let is_nameless = resume_note::job().is_none_or(|job| job == NAMELESS);
    if restarts() == 0 && is_nameless { forget(folder) } else { Ok(()) }
}

/// Removes the record.
pub(crate) fn forget(folder: &Path) -> Result<()> {
    let path = folder.join(FILE);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(FileError::write(&path, error).into()),
        _ => Ok(()),
    }
}
