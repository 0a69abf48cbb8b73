//! Functions for a process that a launcher has started.

use std::io::Write;

use comm::launcher::{self, SPAWNER_PID};
use comm::{EXIT_PEER_FAILED, Error, Result};
use rustix::process::Pid;

use super::environment::RESTART_COUNT;
use super::lines::{MAX_RESULT, RESULT_PREFIX};
use super::{init, reaper};
use crate::platform::guard;

/// Whether [`spawn`](crate::spawn) started this process. False in a rank of `torchrun` or of a scheduler: a program
/// that needs to detect these calls [`run`](crate::run), or [`LaunchedRank::from_env`](comm::LaunchedRank::from_env).
///
/// ```
/// assert!(!launch::is_worker());
/// ```
pub fn is_worker() -> bool {
    launcher::is_worker()
}

/// Returns how often the ranks of this job were started before, as set by the launcher (also by `torchrun`); 0 without
/// a launcher. A program that writes checkpoints resumes from the last one if this is not 0.
///
/// ```
/// assert_eq!(launch::restarts(), 0);
/// ```
pub fn restarts() -> usize {
    let count = std::env::var(RESTART_COUNT).ok().and_then(|count| count.parse().ok());
    count.filter(|_| std::env::var_os("RANK").is_some()).unwrap_or(0)
}

/// Makes sure that this process does not outlive the launcher that started it, even if that is killed with SIGKILL.
/// Call it first thing in `main`; it does nothing else if no launcher started this process.
///
/// On Linux the kernel kills this process when its parent ends, even while this process is stopped. That remains in
/// effect if this process executes another program, but does not apply to its children. If another process stands
/// between the launcher and this one, and on other systems, a thread watches the launcher.
///
/// In the first process of a container (PID 1) it does not return: it starts the program once more, passes signals on to
/// that, reaps what its descendants leave behind, and ends as the program does.
///
/// # Errors
/// [`Error::InvalidArgument`] if `GIRANDOLE_SPAWNER_PID` is not a process id, [`Error::System`] if the system refuses.
///
/// ```no_run
/// fn main() -> comm::Result<()> {
///     launch::worker_guard()?;
///     // ...
///     Ok(())
/// }
/// ```
pub fn worker_guard() -> Result<()> {
    reaper::serve_if_asked();
    init::serve_if_first()?;
    let Some(value) = std::env::var_os(SPAWNER_PID) else { return Ok(()) };
    let value = value.to_string_lossy();
    let spawner = value.parse().ok().filter(|&pid| pid > 0).and_then(Pid::from_raw);
    let help = "the process id of the launcher; unset it to run without one";
    let spawner = spawner.ok_or_else(|| Error::invalid(SPAWNER_PID, &value, help))?;
    if !guard::end_with(spawner, leave)? {
        // Also if a shell has inherited the variable from a launcher that has long ended. If the line cannot be
        // written, only the exit code remains.
        let _ = writeln!(std::io::stderr().lock(), "error: {}", gone(&value));
        leave();
    }
    Ok(())
}

fn gone(spawner: &str) -> Error {
    let help = "that launcher is gone, so this rank ends; unset the variable to run without one";
    Error::invalid(SPAWNER_PID, spawner, help)
}

/// Ends this process because its launcher is gone.
fn leave() -> ! {
    std::process::exit(EXIT_PEER_FAILED)
}

/// Sends one line of text, usually JSON, to the launcher, whose [`spawn`](super::spawn) returns it. Only the last
/// report of a rank counts. Does nothing if no launcher started this process.
///
/// # Errors
/// [`Error::InvalidArgument`] for text of several lines or of more than 64 MiB, [`Error::System`] if standard output
/// cannot be written.
///
/// ```
/// launch::report_result("{\"loss\":0.5}")?;
/// assert!(launch::report_result("two\nlines").is_err());
/// # Ok::<(), comm::Error>(())
/// ```
pub fn report_result(text: &str) -> Result<()> {
    if text.contains('\n') {
        return Err(Error::invalid("result", format!("{text:.40?}..."), "one line of text"));
    }
    if text.len() > MAX_RESULT {
        return Err(Error::invalid(
            "result",
            format!("{} bytes", text.len()),
            format!("at most {MAX_RESULT} bytes"),
        ));
    }
    if !is_worker() {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    let written = out.write_all(format!("{RESULT_PREFIX}{text}\n").as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Error::system("cannot report to the launcher", e))
}
