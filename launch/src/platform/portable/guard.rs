//! Ends this process together with its launcher.

use std::time::Duration;

use comm::{Error, Result};
use rustix::io::Errno;
use rustix::process::{Pid, getppid, test_kill_process};

/// How often the launcher is looked at. Where it looks after what its ranks leave behind, the process that does so has ended
/// this one before (`warden.rs`).
const PERIOD: Duration = Duration::from_millis(500);

/// A thread watches the launcher, and calls `leave` when it is gone.
pub(crate) fn end_with(spawner: Pid, leave: fn() -> !) -> Result<()> {
    let gone = move || test_kill_process(spawner) == Err(Errno::SRCH);
    let parent = getppid();
    if parent != Some(spawner) && gone() {
        leave();
    }
    let watch = move || {
        while getppid() == parent && !gone() {
            std::thread::sleep(PERIOD);
        }
        leave();
    };
    let thread = std::thread::Builder::new().name("launcher".into()).spawn(watch);
    thread.map(drop).map_err(|e| Error::system("cannot watch the launcher", e))
}
