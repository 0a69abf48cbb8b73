//! The program that runs, to be started once more.

use std::io;
use std::process::Command;

/// Starts this program, by its file's name: one that was removed since cannot be started any more, and one that was replaced is
/// another program.
pub(crate) fn command() -> io::Result<Command> {
    std::env::current_exe().map(Command::new)
}
