//! Output files: checking before any work that they can be written, and writing them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use training::FileError;
use training::internal::lock;

/// The folders that this process has made, outer ones first.
static MADE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Checks whether [`write()`] can write a file. An existing file is not changed, and a missing one not created, since
/// several ranks check at the same time.
///
/// # Errors
/// The reason why it cannot be written.
pub fn check_in_place(path: &Path) -> std::result::Result<(), FileError> {
    match fs::metadata(path) {
        // A device or a pipe: opening it may have side effects.
        Ok(found) if !found.is_file() && !found.is_dir() => Ok(()),
        _ => training::internal::check_writable(path),
    }
}

/// Writes a file atomically: on failure an older file is unchanged. A device or pipe is written to directly.
///
/// # Errors
/// The reason why it cannot be written.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> std::result::Result<(), FileError> {
    training::internal::write_output(path, bytes.as_ref()).map_err(|error| FileError::write(path, error))
}

/// Checks whether files can be created in a folder, with an unnamed temporary file: invisible to other processes, and
/// never left behind.
fn check_folder(folder: &Path) -> std::io::Result<()> {
    fs::metadata(folder)?;
    tempfile::tempfile_in(folder).map(drop)
}

/// Creates a folder if it does not exist, and checks that files can be created in it.
///
/// # Errors
/// The reason why they cannot.
pub(crate) fn make_folder(dir: &Path) -> std::result::Result<(), FileError> {
    if fs::metadata(dir).is_ok_and(|found| !found.is_dir()) {
        return Err(FileError::write(dir, "it is a file: give a folder"));
    }
    let missing: Vec<PathBuf> = dir
        .ancestors()
        .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
        .map(Into::into)
        .collect();
    let made = fs::create_dir_all(dir).and_then(|()| check_folder(dir));
    lock(&MADE).extend(missing.into_iter().rev());
    made.map_err(|error| FileError::write(dir, error))
}

/// Removes the folders that this process has made and that are still empty.
pub(crate) fn remove_made_folders() {
    // The inner ones first.
    lock(&MADE).drain(..).rev().for_each(|folder| drop(fs::remove_dir(folder)));
}

/// Returns a path that is equal for two names of the same regular file; `None` for devices and pipes, which several
/// options may share.
pub(crate) fn file_identity(path: &Path) -> Option<PathBuf> {
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
