//! Being the first process of a container (PID 1): such a process adopts what its descendants leave behind, and must reap
//! it. So this program is started once more, below it: then no exit status that the program itself waits for is taken.

use std::env;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, exit};

use comm::{Error, Result};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;

use super::signals::FORWARDED_SIGNALS;
use crate::platform::{Mask, program, unblock, unblocked};

/// Number of the first process of a container.
const FIRST: u32 = 1;

/// In the first process of a container: starts the program below it, passes signals on to it, reaps everything, and ends
/// as the program does. Returns in any other process.
pub(super) fn serve_if_first() -> Result<()> {
    if std::process::id() != FIRST {
        return Ok(());
    }
    let failed = |e| Error::system("cannot start this program below the first process of its container", e);
    let mut command = program::command().map_err(failed)?;
    let mut words = env::args_os();
    if let Some(name) = words.next() {
        command.arg0(name);
    }
    Err(failed(serve(command.args(words))))
}

/// Returns only if the program cannot be started.
fn serve(command: &mut Command) -> std::io::Error {
    let ignored = Mask::ignored();
    // Before the program is started, so that none is lost. What is ignored stays so, here and there; except for SIGCHLD,
    // as exit statuses would be lost.
    let passed_on = FORWARDED_SIGNALS.into_iter().filter(|&signal| !ignored.has(signal));
    let signals = Signals::new(passed_on.chain(ignored.has(SIGCHLD).then_some(SIGCHLD)));
    let program = signals.and_then(|signals| Ok((signals, unblocked(command, &FORWARDED_SIGNALS).spawn()?)));
    let (mut signals, child) = match program {
        Ok(started) => started,
        Err(error) => return error,
    };
    let program = Pid::from_child(&child);
    let pass_on = move || {
        unblock(&FORWARDED_SIGNALS);
        for signal in signals.forever().filter(|&signal| signal != SIGCHLD).filter_map(Signal::from_named_raw)
        {
            // Fails only if the program has just ended.
            let _ = kill_process(program, signal);
        }
    };
    let thread = std::thread::Builder::new().name("signals".into()).spawn(pass_on);
    if let Err(error) = thread {
        let _ = kill_process(program, Signal::KILL);
        return error;
    }
    exit(reap_until(program))
}

/// Reaps all children until this one has ended, and returns its exit code, or 128 + the signal that killed it.
fn reap_until(program: Pid) -> i32 {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == program => {
                return code_of(ExitStatus::from_raw(status.as_raw()));
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return 1,
        }
    }
}

fn code_of(status: ExitStatus) -> i32 {
    status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}
