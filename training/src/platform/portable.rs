//! Unnamed files: not supported on this system.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Always `None`: this system has no unnamed files.
pub(crate) fn nameless(_: &Path) -> Option<File> {
    None
}

/// Always an error: this system has no unnamed files.
pub(crate) fn link(_: &File, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}
