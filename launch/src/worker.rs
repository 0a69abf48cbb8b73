//! What a process does that a launcher has started.

use std::io::Write;

use comm::launcher::{self, SPAWNER_PID};
use comm::{EXIT_PEER_FAILED, Error, Result};
use rustix::process::Pid;

use super::environment::RESTART_COUNT;
use super::lines::{MAX_RESULT, RESULT_PREFIX};
use super::warden;
use crate::platform::guard;

/// True where [`spawn`](crate::spawn) started this process. False in a rank of `torchrun` or of a scheduler: a program that is to
/// know of these calls [`run`](crate::run), or asks [`Place::from_env`](comm::Place::from_env).
///
/// ```
/// assert!(!launch::is_worker());
/// ```
pub fn is_worker() -> bool {
    launcher::is_worker()
}

/// How often the ranks of this process's job were started before, as its launcher tells (`torchrun`, too); 0 where none does.
/// A program that keeps checkpoints goes on from the last one where this is not 0.
///
/// ```
/// assert_eq!(launch::restarts(), 0);
/// ```
pub fn restarts() -> usize {
    let count = std::env::var(RESTART_COUNT).ok().and_then(|count| count.parse().ok());
    count.filter(|_| std::env::var_os("RANK").is_some()).unwrap_or(0)
}

/// Makes sure that this process does not outlive the launcher that started it, not even where that one is killed with
/// SIGKILL. To be called first thing in `main`; does nothing where no launcher started it.
///
/// On Linux the kernel ends this process together with its parent, also when it is stopped. That stays so for a program
/// that this process executes in its own place, but not for its children. Where another process stands between the
/// launcher and this one, and on other systems, a thread watches the launcher.
///
/// # Errors
/// [`Error::InvalidArgument`] where `GIRANDOLE_SPAWNER_PID` is no process id, [`Error::System`] where the system refuses.
///
/// ```no_run
/// fn main() -> comm::Result<()> {
///     launch::worker_guard()?;
///     // ...
///     Ok(())
/// }
/// ```
pub fn worker_guard() -> Result<()> {
    warden::serve_if_asked();
    let Some(value) = std::env::var_os(SPAWNER_PID) else { return Ok(()) };
    let value = value.to_string_lossy();
    let spawner = value.parse().ok().filter(|&pid| pid > 0).and_then(Pid::from_raw);
    let help = "the process id of the launcher; unset it to run without one";
    let spawner = spawner.ok_or_else(|| Error::invalid(SPAWNER_PID, &value, help))?;
    guard::end_with(spawner, leave)
}

/// Ends this process because its launcher is gone.
fn leave() -> ! {
    std::process::exit(EXIT_PEER_FAILED)
}

/// Passes one line of text, JSON as a rule, to the launcher, whose [`spawn`](super::spawn) returns it. The last report
/// of a rank counts. Does nothing where no launcher started this process.
///
/// # Errors
/// [`Error::InvalidArgument`] for text of several lines or of more than 64 MiB, [`Error::System`] where standard output
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
