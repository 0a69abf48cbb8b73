//! Unnamed files (`O_TMPFILE`) on Linux.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, OFlags, linkat};

/// Creates a file without a name, which [`link`] can name later; `None` if the system or file system does not support
/// it.
pub(crate) fn nameless(folder: &Path) -> Option<File> {
    // `link` needs it.
    fs::metadata("/proc/self/fd").ok()?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o666).custom_flags(OFlags::TMPFILE.bits() as i32);
    options.open(folder).ok()
}

/// Links an unnamed file to a name.
pub(crate) fn link(file: &File, name: &Path) -> io::Result<()> {
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, own, CWD, name, AtFlags::SYMLINK_FOLLOW)?)
}
