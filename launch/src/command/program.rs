//! Finding the program to launch.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Result;

use super::no_program;
use crate::machine::in_path;

/// The name under which this executable is installed.
const OWN_NAME: &str = "girandole";

/// A program to start.
#[derive(Debug, PartialEq)]
pub(super) struct Program {
    pub(super) path: PathBuf,
    /// Whether it is this executable, whose ranks can take over the port that the launcher holds.
    pub(super) is_this_one: bool,
}

impl Program {
    /// Finds a program: a path, or a name that is searched in `PATH`. If `girandole` is not installed, its name
    /// stands for the running executable.
    pub(super) fn find(name: &OsStr) -> Result<Self> {
        let own = std::env::current_exe().ok();
        let search = std::env::var_os("PATH").unwrap_or_default();
        let found = match name.as_encoded_bytes().contains(&b'/') {
            true => Some(PathBuf::from(name)).filter(|path| path.exists()),
            false => in_path(name, &search),
        };
        let found = found.or_else(|| own.clone().filter(|_| name == OWN_NAME));
        let path = found.ok_or_else(|| no_program(name.display()))?;
        let is_this_one = own.is_some_and(|own| same_file(&own, &path));
        Ok(Self { path, is_this_one })
    }
}

fn same_file(a: &Path, b: &Path) -> bool {
    let identity = |path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    identity(a).is_some_and(|a| Some(a) == identity(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_is_known_under_any_path() {
        let own = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert!(Program::find(link.as_os_str()).unwrap().is_this_one);
        assert!(!Program::find("sh".as_ref()).unwrap().is_this_one);
        let message = Program::find("no/such/program".as_ref()).unwrap_err().to_string();
        assert!(message.starts_with("PROGRAM: got no/such/program; no such program"), "{message}");
    }
}
