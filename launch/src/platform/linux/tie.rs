//! Ties a rank's process to the launcher from its start, whatever program it runs.
#![allow(unsafe_code, reason = "what a child does between fork and exec has no safe form")]

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// Makes the kernel kill the process that `command` starts when the calling thread ends. The calling thread waits for
/// the ranks, so it ends only with the launcher's process.
pub(crate) fn to_this_thread(command: &mut Command) {
    let launcher: Pid = getpid();
    let tie = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The launcher may have ended before that call.
        if getppid() == Some(launcher) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec only these two system calls are made, which are async-signal-safe; no memory is
    // allocated and no lock is taken. An `io::Error` made of an error number allocates nothing.
    unsafe { command.pre_exec(tie) };
}
