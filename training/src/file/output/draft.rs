//! Temporary names of unfinished files.

use ops::kernels::lock;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Unfinished files of this process.
static DRAFTS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn drafts() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    lock(&DRAFTS)
}

/// Temporary name of an unfinished file; dropping it removes the file.
#[derive(Debug)]
pub(super) struct TempName(PathBuf);

impl TempName {
    /// Creates the file with `make` and registers its name.
    pub(super) fn new<T>(name: &Path, make: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<(T, Self)> {
        // Held while the file is created, so that `remove_drafts` cannot run in between.
        let mut drafts = drafts();
        let made = make(name)?;
        drafts.insert(name.to_path_buf());
        Ok((made, Self(name.to_path_buf())))
    }

    #[cfg(test)]
    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Moves the file to its path. If that fails, the file is removed.
    pub(super) fn rename(self, target: &Path) -> io::Result<()> {
        fs::rename(&self.0, target)?;
        drafts().remove(&self.0);
        Ok(())
    }
}

impl Drop for TempName {
    fn drop(&mut self) {
        if drafts().remove(&self.0) {
            let _ = fs::remove_file(&self.0);
        }
    }
}

/// Removes this process's unfinished [`AtomicFile`](crate::internal::AtomicFile)s that have temporary names: for a program that
/// is terminated by a signal.
///
/// ```
/// training::internal::remove_drafts();
/// ```
pub fn remove_drafts() {
    // A thread that holds the lock may hang on a file system that does not respond, so this gives up after 100 ms.
    for _ in 0..50 {
        if let Ok(mut drafts) = DRAFTS.try_lock() {
            return std::mem::take(&mut *drafts).into_iter().for_each(|name| drop(fs::remove_file(name)));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
