//! Starts the running program once more.

use std::io;
use std::process::Command;

/// Returns a command that starts this program by its path. It fails if the file was removed since, and starts another
/// program if the file was replaced.
pub(crate) fn command() -> io::Result<Command> {
    std::env::current_exe().map(Command::new)
}
