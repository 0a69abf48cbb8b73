//! Starts the running program once more.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Suffix with which Linux marks the path of an executable that has been removed since it was started.
const REMOVED: &[u8] = b" (deleted)";
/// Executable of this process, even if its path was removed.
const OWN: &str = "/proc/self/exe";

/// Returns a command that starts this program. Its file may have been removed or replaced since it was started, for
/// example by a build; the ranks of a job must all run the same build.
pub(crate) fn command() -> io::Result<Command> {
    let path = env::current_exe()?;
    let name = path.as_os_str().as_encoded_bytes();
    match name.strip_suffix(REMOVED).filter(|_| !path.exists()) {
        None => Ok(Command::new(path)),
        Some(name) => {
            let mut command = Command::new(OWN);
            command.arg0(OsStr::from_bytes(name));
            Ok(command)
        }
    }
}
