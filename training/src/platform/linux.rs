//! Files without a name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, OFlags, linkat};

/// A file without a name, where there can be one that is given a name later.
pub(crate) fn nameless(folder: &Path) -> Option<File> {
    // The way to give it a name.
    fs::metadata("/proc/self/fd").ok()?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o666).custom_flags(OFlags::TMPFILE.bits() as i32);
    options.open(folder).ok()
}

/// Gives it a name.
pub(crate) fn link(file: &File, name: &Path) -> io::Result<()> {
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, own, CWD, name, AtFlags::SYMLINK_FOLLOW)?)
}
