//! Files to be written: whether they can be is found out before any work is done.

use std::fs;
use std::path::{Path, PathBuf};

use crate::file_error::FileError;
use crate::weights;

/// Whether [`write()`] can write a file. One that exists is not changed, and one that does not is not made: several ranks look at
/// the same time.
///
/// # Errors
/// Why it cannot be written.
pub fn check_in_place(path: &Path) -> std::result::Result<(), FileError> {
    match fs::metadata(path) {
        // A device or a pipe: opening it may have an effect of its own.
        Ok(found) if !found.is_file() && !found.is_dir() => Ok(()),
        _ => weights::check_writable(path),
    }
}

/// Writes a file whole, or leaves an older one as it was; a device or pipe gets the bytes as they are.
///
/// # Errors
/// Why it cannot be written.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> std::result::Result<(), FileError> {
    training::write_output(path, bytes.as_ref()).map_err(|error| FileError::write(path, error))
}

/// Whether files can be made in a folder, by one without a name: no other process sees it, and nothing stays behind.
pub(crate) fn check_folder(folder: &Path) -> std::io::Result<()> {
    fs::metadata(folder)?;
    tempfile::tempfile_in(folder).map(drop)
}

/// The same for two paths that name one regular file; `None` for devices and pipes, which several may share.
pub(crate) fn place(path: &Path) -> Option<PathBuf> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => None,
        Ok(_) => path.canonicalize().ok(),
        Err(_) => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
            Some(folder.join(path.file_name()?))
        }
    }
}

#[cfg(test)]
mod tests;
