//! Ties a rank's process to the launcher from its first moment on, whatever program it runs.
#![allow(unsafe_code, reason = "what a child does between fork and exec has no safe form")]

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// The process that `command` starts is killed when the calling thread ends: a launcher's thread ends with its process, as it
/// waits for the ranks.
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
