//! The lines of an earlier run, while another one writes to their file.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use training::AtomicFile;

use crate::console::note;

/// What was in a file when a run began: a copy on the same disk, without a name where the system can do that. Unless it is
/// forgotten, it gets its place back where the run has written nothing, else one beside it.
#[derive(Debug)]
pub(super) struct Earlier {
    target: PathBuf,
    /// None once it is forgotten.
    copy: Option<AtomicFile>,
}

impl Earlier {
    /// Copies what is in a file, if there is anything.
    pub(super) fn keep(path: &Path) -> io::Result<Option<Self>> {
        if !fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0) {
            return Ok(None);
        }
        let target = path.canonicalize()?;
        let mut copy = AtomicFile::create(&target)?;
        io::copy(&mut File::open(&target)?, &mut copy)?;
        Ok(Some(Self { target, copy: Some(copy) }))
    }

    pub(super) fn forget(mut self) {
        self.copy = None;
    }
}

impl Drop for Earlier {
    fn drop(&mut self) {
        let Some(copy) = self.copy.take() else { return };
        if fs::metadata(&self.target).is_ok_and(|found| found.len() == 0) {
            // Where that fails the run has failed already, and says why.
            let _ = copy.commit();
            return;
        }
        let mut name = self.target.file_name().unwrap_or_default().to_os_string();
        name.push(".earlier");
        let beside = self.target.with_file_name(name);
        if copy.commit_as(&beside).is_ok() {
            note(format_args!("the lines of an earlier run are in {} now", beside.display()));
        }
    }
}
