//! Signals that come while a command has no ranks: its first moments, and what it does alone.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use comm::{Error, Place};
use launch::{is_worker, on_signal};
use signal_hook::low_level;

use crate::error::Result;
use crate::progress;

/// From now on a signal to this process is told in one line, and the exit code tells which it was. Not so in a rank, of whose end
/// whoever started it tells.
///
/// # Errors
/// A system that refuses.
pub(crate) fn tell() -> Result<()> {
    let launches = std::env::args_os().nth(1).is_some_and(|command| command == "launch");
    // What is wrong with the environment is told by whoever joins.
    let is_rank = is_worker() || matches!(Place::from_env(), Ok(Some(_)));
    if is_rank && !launches {
        return Ok(on_signal(end_rank)?);
    }
    Ok(on_signal(end)?)
}

/// How long the terminal may take to show the line.
const SHOWN: Duration = Duration::from_secs(1);

/// Files of this process that its end by a signal removes.
static FILES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes this file, too, when a signal ends this process.
pub(crate) fn removes(file: &Path) {
    FILES.lock().unwrap_or_else(PoisonError::into_inner).push(file.into());
}

fn remove_files() {
    training::remove_drafts();
    if let Ok(files) = FILES.try_lock() {
        files.iter().for_each(|file| drop(std::fs::remove_file(file)));
    }
}

/// A rank ends of the signal itself, and leaves no file that it has begun.
fn end_rank(signal: i32) {
    remove_files();
    let _ = low_level::emulate_default_handler(signal);
}

fn end(signal: i32) {
    remove_files();
    let code = i32::from(Error::Interrupted { signal }.exit_code());
    // What this process prints may be stuck in a pipe that nobody reads, with the bar and the terminal in its hands.
    std::thread::spawn(move || {
        std::thread::sleep(SHOWN);
        low_level::exit(code);
    });
    progress::aside(|| {
        let name = low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string);
        // Where nobody reads it, the exit code has to do.
        let _ = writeln!(std::io::stderr().lock(), "error: stopped by {name}");
        // At once: other threads are at work, with what would be taken down otherwise.
        low_level::exit(code)
    })
}
