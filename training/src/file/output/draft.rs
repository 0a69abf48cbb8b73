//! Names of files that are not whole yet.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Those of this process.
static DRAFTS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn drafts() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    DRAFTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of a file that is not whole yet; the file is removed with this.
#[derive(Debug)]
pub(super) struct Draft(PathBuf);

impl Draft {
    /// `make` makes the file.
    pub(super) fn new<T>(name: &Path, make: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<(T, Self)> {
        // Not made while all are removed.
        let mut drafts = drafts();
        let made = make(name)?;
        drafts.insert(name.to_path_buf());
        Ok((made, Self(name.to_path_buf())))
    }

    #[cfg(test)]
    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Gives the file its place. Where that fails, the file is removed.
    pub(super) fn rename(self, target: &Path) -> io::Result<()> {
        fs::rename(&self.0, target)?;
        drafts().remove(&self.0);
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if drafts().remove(&self.0) {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Removes the files that this process has begun as an [`AtomicFile`](crate::AtomicFile) and that are not whole yet, where they
/// have names: for a program that a signal ends.
///
/// ```
/// training::remove_drafts();
/// ```
pub fn remove_drafts() {
    // Who is about to make one may hang, of a file system that does not answer.
    for _ in 0..50 {
        if let Ok(mut drafts) = DRAFTS.try_lock() {
            return std::mem::take(&mut *drafts).into_iter().for_each(|name| drop(fs::remove_file(name)));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
