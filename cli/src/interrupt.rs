//! Signal handling while a command has no ranks: at startup, and during single-process work.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use comm::LaunchedRank;
use girandole::trainer::StopFlag;
use launch::Error;
use launch::{is_worker, on_signal};
use signal_hook::low_level;

use crate::error::Result;
use crate::live_page;
use crate::progress;
use training::internal::lock;

/// Installs signal handlers: from now on, a signal to this process prints one line and sets the exit code. In a rank,
/// the handler only removes files, since the launcher reports how the rank ended.
///
/// # Errors
/// A system call that fails.
pub(crate) fn install_handlers() -> Result<()> {
    let launches = std::env::args_os().nth(1).is_some_and(|command| command == "launch");
    // An invalid environment is reported later, when the process joins the group.
    let is_rank = is_worker() || matches!(LaunchedRank::from_env(), Ok(Some(_)));
    if is_rank && !launches {
        return Ok(on_signal(end_rank)?);
    }
    Ok(on_signal(end)?)
}

/// How long printing the message may take before the process exits without it.
const PRINT_TIMEOUT: Duration = Duration::from_secs(1);

/// Files that are removed if a signal ends this process.
static FILES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Registers a file to be removed if a signal ends this process.
pub fn remove_on_signal(file: &Path) {
    lock(&FILES).push(file.into());
}

fn remove_files() {
    training::internal::remove_drafts();
    if let Ok(files) = FILES.try_lock() {
        files.iter().for_each(|file| drop(std::fs::remove_file(file)));
    }
}

/// The signals that ask a run to stop with a checkpoint, and its request; `None` while no run would.
static STOP: Mutex<Option<(Vec<i32>, StopFlag)>> = Mutex::new(None);

/// Makes some signals stop this rank's run with a checkpoint, instead of ending it at once, until it is dropped; once one has
/// arrived, for good: the rank ends by itself then, and the signal may come twice.
#[derive(Debug)]
pub struct StopOnSignal(StopFlag);

impl StopOnSignal {
    /// Begins with these signals.
    pub(crate) fn new(signals: Vec<i32>) -> Self {
        let flag = StopFlag::default();
        *lock(&STOP) = Some((signals, flag.clone()));
        Self(flag)
    }

    /// Returns the request that the signals make.
    pub fn flag(&self) -> StopFlag {
        self.0.clone()
    }
}

impl Drop for StopOnSignal {
    fn drop(&mut self) {
        if !self.0.is_requested() {
            *lock(&STOP) = None;
        }
    }
}

/// Asks the run to stop with a checkpoint. Otherwise ends the run's page, removes unfinished files, then ends the rank by the
/// signal's default action.
fn end_rank(signal: i32) {
    if let Some((signals, flag)) = &*lock(&STOP)
        && signals.contains(&signal)
    {
        return flag.request_by(signal);
    }
    live_page::stop_on_signal();
    remove_files();
    let _ = low_level::emulate_default_handler(signal);
}

fn end(signal: i32) {
    remove_files();
    let code = i32::from(Error::Interrupted { signal }.exit_code());
    // Printing may block on a pipe that nobody reads, with the locks on the progress bar and standard error held.
    let limit = std::thread::Builder::new().spawn(move || {
        std::thread::sleep(PRINT_TIMEOUT);
        low_level::exit(code);
    });
    if limit.is_err() {
        low_level::exit(code);
    }
    progress::aside(|| {
        let name = low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string);
        // If standard error is closed, the exit code is all that is left.
        let _ = writeln!(std::io::stderr().lock(), "error: stopped by {name}");
        // Exit immediately, without destructors: other threads are still using what would be destroyed.
        low_level::exit(code)
    })
}
