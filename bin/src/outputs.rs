//! Files to be written: whether they can be is found out before any work is done.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::file_error::FileError;
use crate::options::CommonOptions;
use crate::weights;

impl CommonOptions {
    /// Checks that all results can be written, and that none would destroy another or an input.
    pub(crate) fn check_files(&self) -> Result<()> {
        let (inputs, outputs) = (self.inputs(), self.outputs());
        let mut seen: Vec<(&str, PathBuf)> = Vec::new();
        for (option, path) in inputs.into_iter().chain(outputs) {
            let Some(place) = path.as_deref().and_then(place) else { continue };
            let is_input = inputs.iter().any(|(input, _)| *input == option);
            if let Some((other, _)) = seen.iter().find(|(_, taken)| *taken == place).filter(|_| !is_input) {
                // Weights that are saved where they came from are a run that goes on.
                if (*other, option) != ("--init", "--save") {
                    return Err(Error::SameFile { option, other: other.to_string(), path: place });
                }
            }
            seen.push((option, place));
        }
        for path in [&self.metrics, &self.trace, &self.report].into_iter().flatten() {
            check_in_place(path)?;
        }
        Ok(self.save.as_deref().map_or(Ok(()), weights::check_writable)?)
    }

    /// The same of one more file that an experiment writes.
    pub(crate) fn check_output(&self, option: &'static str, path: &Path) -> Result<()> {
        let found = place(path);
        for (other, path) in self.inputs().into_iter().chain(self.outputs()) {
            if let (Some(found), true) = (&found, path.as_deref().and_then(place) == found) {
                return Err(Error::SameFile { option, other: other.to_string(), path: found.clone() });
            }
        }
        Ok(check_in_place(path)?)
    }

    fn inputs(&self) -> [(&'static str, &Option<PathBuf>); 2] {
        [("--data", &self.data), ("--init", &self.init)]
    }

    fn outputs(&self) -> [(&'static str, &Option<PathBuf>); 4] {
        [
            ("--metrics", &self.metrics),
            ("--trace", &self.trace),
            ("--report", &self.report),
            ("--save", &self.save),
        ]
    }
}

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
