//! Ties the life of this process to its launcher.

use std::os::fd::OwnedFd;

use comm::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getppid, pidfd_open, set_parent_process_death_signal};

/// Makes the kernel kill this process when its parent ends, even while this process is stopped. If another process
/// stands between the launcher and this one, a thread watches the launcher and calls `leave` when it ends. Returns
/// false if it has ended already.
pub(crate) fn end_with(spawner: Pid, leave: fn() -> !) -> Result<bool> {
    let refused = |e| Error::system("cannot tie this process to its launcher", e);
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(refused)?;
    if getppid() == Some(spawner) {
        return Ok(true);
    }
    // The launcher ended before the call above, or another process stands in between.
    let handle = match pidfd_open(spawner, PidfdFlags::empty()) {
        Ok(handle) => handle,
        Err(Errno::SRCH) => return Ok(false),
        Err(e) => return Err(refused(e)),
    };
    if has_ended(&handle, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        return Ok(false);
    }
    let watch = move || {
        while !has_ended(&handle, None) {}
        leave();
    };
    let thread = std::thread::Builder::new().name("launcher".into()).spawn(watch);
    thread.map(|_| true).map_err(|e| Error::system("cannot watch the launcher", e))
}

/// Waits for a process to end, and returns whether it has. Without a timeout it waits as long as it takes; a signal may
/// interrupt it.
fn has_ended(handle: &OwnedFd, timeout: Option<&Timespec>) -> bool {
    let mut fds = [PollFd::new(handle, PollFlags::IN)];
    poll(&mut fds, timeout).is_ok_and(|ready| ready > 0)
}
