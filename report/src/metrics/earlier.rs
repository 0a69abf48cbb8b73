//! Preserves the lines of an earlier run while another run writes to their file.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The earlier content of a file, moved to `NAME.earlier` when a run begins, so that it is not lost whatever happens to
/// the run. Unless `forget` is called, it is moved back on drop if the run has written nothing.
#[derive(Debug)]
pub(super) struct PreservedLines {
    target: PathBuf,
    /// Path of the moved file; `None` once it is forgotten.
    beside: Option<PathBuf>,
}

impl PreservedLines {
    /// Moves the content of a file to `NAME.earlier`, if there is any, and creates an empty file in its place.
    pub(super) fn keep(path: &Path) -> io::Result<Option<Self>> {
        let Ok(found) = fs::metadata(path) else { return Ok(None) };
        if !found.is_file() || found.len() == 0 {
            return Ok(None);
        }
        let target = path.canonicalize()?;
        // Checked first, so that a file that cannot be written is not moved.
        fs::File::options().write(true).open(&target)?;
        let beside = free_name(&target);
        fs::rename(&target, &beside)?;
        let kept = Self { target, beside: Some(beside) };
        fs::File::create(&kept.target)?.set_permissions(found.permissions())?;
        Ok(Some(kept))
    }

    pub(super) fn forget(mut self) {
        if let Some(beside) = self.beside.take() {
            // If it cannot be removed, it does no harm.
            let _ = fs::remove_file(beside);
        }
    }
}

impl Drop for PreservedLines {
    fn drop(&mut self) {
        let Some(beside) = self.beside.take() else { return };
        let is_empty = fs::metadata(&self.target).map_or(true, |found| found.len() == 0);
        if is_empty && fs::rename(&beside, &self.target).is_ok() {
            return;
        }
        // An error of writing the note is ignored.
        let _ = writeln!(
            io::stderr().lock(),
            "note: the lines of an earlier run are in {} now",
            beside.display()
        );
    }
}

/// Returns `NAME.earlier`, or a numbered name if an earlier run that was killed has left that one.
fn free_name(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_os_string();
    name.push(".earlier");
    let mut beside = target.with_file_name(&name);
    let mut number = 2;
    while beside.symlink_metadata().is_ok() {
        let mut numbered = name.clone();
        numbered.push(format!("-{number}"));
        beside = target.with_file_name(numbered);
        number += 1;
    }
    beside
}
