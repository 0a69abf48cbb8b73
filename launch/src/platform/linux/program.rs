//! The program that runs, to be started once more.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What Linux says of a file that has been removed since it was opened.
const REMOVED: &[u8] = b" (deleted)";
/// The file of the program that runs, whatever has become of its name.
const OWN: &str = "/proc/self/exe";

/// Starts this program. Its file may have been removed or replaced since it was started, as a build does; the ranks of a job
/// must be of one build.
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
