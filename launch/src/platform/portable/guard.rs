//! Ties the life of this process to its launcher.

use std::time::Duration;

use comm::{Error, Result};
use rustix::io::Errno;
use rustix::process::{Pid, getppid, test_kill_process};

/// How often to check for the launcher. If the launcher has a reaper (`reaper.rs`), that has killed this process
/// before.
const PERIOD: Duration = Duration::from_millis(500);

/// Starts a thread that watches the launcher, and calls `leave` when it is gone. Returns false if it is gone already.
pub(crate) fn end_with(spawner: Pid, leave: fn() -> !) -> Result<bool> {
    let gone = move || test_kill_process(spawner) == Err(Errno::SRCH);
    let parent = getppid();
    if parent != Some(spawner) && gone() {
        return Ok(false);
    }
    let watch = move || {
        while getppid() == parent && !gone() {
            std::thread::sleep(PERIOD);
        }
        leave();
    };
    let thread = std::thread::Builder::new().name("launcher".into()).spawn(watch);
    thread.map(|_| true).map_err(|e| Error::system("cannot watch the launcher", e))
}
