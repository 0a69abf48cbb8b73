//! The lines of an earlier run, while another one writes to their file.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// What was in a file when a run began, in a file beside it, `NAME.earlier`, so that it is there whatever becomes of the run. Unless
/// it is forgotten, it gets its place back where the run has written nothing.
#[derive(Debug)]
pub(super) struct Earlier {
    target: PathBuf,
    /// None once it is forgotten.
    beside: Option<PathBuf>,
}

impl Earlier {
    /// Makes room for new lines: moves what is in a file beside it, if there is anything.
    pub(super) fn keep(path: &Path) -> io::Result<Option<Self>> {
        let Ok(found) = fs::metadata(path) else { return Ok(None) };
        if !found.is_file() || found.len() == 0 {
            return Ok(None);
        }
        let target = path.canonicalize()?;
        // Asked for first, so that a file that may not be written is where it was.
        fs::File::options().write(true).open(&target)?;
        let beside = free_name(&target);
        fs::rename(&target, &beside)?;
        let kept = Self { target, beside: Some(beside) };
        fs::File::create(&kept.target)?.set_permissions(found.permissions())?;
        Ok(Some(kept))
    }

    pub(super) fn forget(mut self) {
        if let Some(beside) = self.beside.take() {
            // It is in nobody's way.
            let _ = fs::remove_file(beside);
        }
    }
}

impl Drop for Earlier {
    fn drop(&mut self) {
        let Some(beside) = self.beside.take() else { return };
        let is_empty = fs::metadata(&self.target).map_or(true, |found| found.len() == 0);
        if is_empty && fs::rename(&beside, &self.target).is_ok() {
            return;
        }
        // Where nobody reads the remark, none is needed.
        let _ = writeln!(
            io::stderr().lock(),
            "note: the lines of an earlier run are in {} now",
            beside.display()
        );
    }
}

/// `NAME.earlier`, or with a number where a run that was killed has left one.
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
