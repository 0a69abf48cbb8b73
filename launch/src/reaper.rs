//! The reaper: kills what the ranks' programs have started and left running, however the launcher ends.
//!
//! It is a separate process that waits for the launcher's end, however that happens. Then it kills the ranks'
//! processes, whose ids the launcher has sent, and every process that has this launcher's spawn id in its environment.

use std::collections::BTreeSet;
use std::io::{PipeWriter, Read, Write, pipe};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use comm::launcher::{LISTENER, SPAWNER_PID};
use comm::{Error, Result};
use rustix::process::{Pid, Signal, kill_process};

use super::elastic::JobFolder;
use super::environment::SPAWN_ID;
use crate::platform::{Killed, processes, program};

/// Environment variable that makes a process a reaper; its value is the spawn id.
const WARDEN: &str = "GIRANDOLE_WARDEN";
/// Longer than a killed process takes to vanish, unless it hangs in the kernel.
const VANISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Longer than a process that executes a program has no environment, also on a busy machine.
const EXECUTION: Duration = Duration::from_millis(200);

/// The launcher's handle of the reaper. Dropping it kills what is left of the job, and waits until that is done.
#[derive(Debug)]
pub(super) struct Reaper {
    child: Child,
    /// The kernel closes it if the launcher is killed.
    alive: Option<PipeWriter>,
}

impl Reaper {
    pub(super) fn start(spawn_id: &str) -> Result<Self> {
        Self::try_start(spawn_id).map_err(|e| Error::system("cannot start the process that tidies up", e))
    }

    fn try_start(spawn_id: &str) -> std::io::Result<Self> {
        let (ended, alive) = pipe()?;
        let mut command = program::command()?;
        command.env(WARDEN, spawn_id).env_remove(SPAWNER_PID).env_remove(LISTENER).env_remove(SPAWN_ID);
        // In its own process group, so that signals from a terminal or a shell to the job's group do not reach it.
        command.process_group(0).stdin(ended).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: command.spawn()?, alive: Some(alive) })
    }

    /// Reports a process that the launcher has started.
    pub(super) fn add(&self, process: Pid) {
        self.send(process.as_raw_pid());
    }

    /// Reports a process that has ended and is about to be reaped; afterwards its id may be reused.
    pub(super) fn remove(&self, process: Pid) {
        self.send(-process.as_raw_pid());
    }

    fn send(&self, word: i32) {
        // A pipe takes these few bytes completely or not at all; if it does not, the reaper still finds the process by
        // its environment.
        let _ = self.alive.as_ref().map(|mut pipe| pipe.write_all(&word.to_ne_bytes()));
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.alive = None;
        // Fails only if other code of this process has reaped it.
        let _ = self.child.wait();
    }
}

/// If this process was started as a reaper, does its work and exits.
pub(super) fn serve_if_asked() {
    let Some(spawn_id) = std::env::var_os(WARDEN).filter(|id| !id.is_empty()) else { return };
    for process in ranks(std::io::stdin().lock()).into_iter().filter_map(Pid::from_raw) {
        // It may have ended by now.
        let _ = kill_process(process, Signal::KILL);
    }
    end_all_with(&[SPAWN_ID.as_bytes(), b"=", spawn_id.as_encoded_bytes()].concat());
    // A launcher that was killed leaves its folder behind; there may be none.
    let _ = std::fs::remove_dir_all(JobFolder::path(&spawn_id.to_string_lossy()));
    std::process::exit(0)
}

/// Returns the processes that were added and not removed, once the launcher has closed its end.
fn ranks(mut words: impl Read) -> BTreeSet<i32> {
    let mut ranks = BTreeSet::new();
    let mut word = [0; 4];
    while words.read_exact(&mut word).is_ok() {
        match i32::from_ne_bytes(word) {
            added @ 1.. => ranks.insert(added),
            removed => ranks.remove(&removed.saturating_neg()),
        };
    }
    ranks
}

/// Kills every process with this variable in its environment, until none is left or the time is over.
fn end_all_with(variable: &[u8]) {
    let (began, mut undecided) = (Instant::now(), None);
    while began.elapsed() < VANISH_TIMEOUT {
        match processes::kill_all_with(variable) {
            Killed { count: 0, undecided: 0 } => return,
            Killed { count: 0, .. } => {
                let since = *undecided.get_or_insert_with(Instant::now);
                if since.elapsed() > EXECUTION {
                    return;
                }
            }
            Killed { .. } => undecided = None,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_were_removed_are_not_killed() {
        let words = [7, 8, -7, 9, i32::MIN, 0].map(i32::to_ne_bytes).concat();
        assert_eq!(ranks(&words[..]), [8, 9].into());
    }
}
