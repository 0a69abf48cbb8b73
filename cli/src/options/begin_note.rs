//! Record of the job that began to write to a folder: what a job has refused at its first start it must not accept when its
//! launcher starts it again, and what it has written itself it must not refuse.

use std::io::ErrorKind;
use std::path::Path;

use launch::restarts;
use training::FileError;

use crate::error::Result;

use super::resume_note;

/// Name of the record of who writes checkpoints to a folder.
pub(crate) const CHECKPOINTS: &str = "begun-by";
/// Name of the record of who writes a model to a folder.
pub(crate) const MODEL: &str = "model-begun-by";

/// Records that this job writes to the folder, if its launcher may start it again.
///
/// # Errors
/// A folder that cannot be written.
pub(crate) fn write(folder: &Path, record: &str) -> Result<()> {
    resume_note::job().map_or(Ok(()), |job| resume_note::write(folder, record, &job))
}

/// Whether this job was started again, and has written to the folder before.
///
/// # Errors
/// A note that cannot be read.
pub(crate) fn is_of_a_restarted_job(folder: &Path, record: &str) -> Result<bool> {
    if restarts() == 0 {
        return Ok(false);
    }
    let begun: Option<String> = resume_note::read(folder, record)?;
    Ok(begun.is_some() && begun == resume_note::job())
}

/// Makes sure that this job, which refuses the folder, does not take the record of another one of the same name for its
/// own when it is started again.
///
/// # Errors
/// A note that cannot be removed.
pub(crate) fn refuse(folder: &Path, record: &str) -> Result<()> {
    if restarts() == 0 { forget(folder, record) } else { Ok(()) }
}

/// Removes the record.
///
/// # Errors
/// A note that cannot be removed.
pub(crate) fn forget(folder: &Path, record: &str) -> Result<()> {
    let path = folder.join(record);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(FileError::write(&path, error).into()),
        _ => Ok(()),
    }
}
