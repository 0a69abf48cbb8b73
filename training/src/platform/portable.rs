//! Files without a name: there are none.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;

/// A file without a name, where there can be one that is given a name later.
pub(crate) fn nameless(_: &Path) -> Option<File> {
    None
}

/// Gives it a name.
pub(crate) fn link(_: &File, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}
