//! Ends what the ranks' programs have started and left behind, however the launcher ends.
//!
//! A process of its own waits for the launcher's end, its death included. Then it kills the ranks' processes, of which it was
//! told, and looks for every process that has the id of what this launcher has started in its environment, and kills it.

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
use crate::platform::{processes, program};

/// Makes a process a warden; holds that id.
const WARDEN: &str = "GIRANDOLE_WARDEN";
/// Longer than a killed process takes to vanish, unless it hangs in the kernel.
const PATIENCE: Duration = Duration::from_secs(5);

/// The warden of a job, as its launcher holds it. Dropping it ends what is left of the job, and waits for that.
#[derive(Debug)]
pub(super) struct Warden {
    child: Child,
    /// Closed by the system where the launcher is killed.
    alive: Option<PipeWriter>,
}

impl Warden {
    pub(super) fn start(spawn_id: &str) -> Result<Self> {
        Self::try_start(spawn_id).map_err(|e| Error::system("cannot start the process that tidies up", e))
    }

    fn try_start(spawn_id: &str) -> std::io::Result<Self> {
        let (ended, alive) = pipe()?;
        let mut command = program::command()?;
        command.env(WARDEN, spawn_id).env_remove(SPAWNER_PID).env_remove(LISTENER).env_remove(SPAWN_ID);
        // In a group of its own: what a terminal or a shell sends to the job's is not for this one.
        command.process_group(0).stdin(ended).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: command.spawn()?, alive: Some(alive) })
    }

    /// The launcher has started this process.
    pub(super) fn add(&self, process: Pid) {
        self.tell(process.as_raw_pid());
    }

    /// This process has ended, and is about to be reaped: its id may be another's then.
    pub(super) fn remove(&self, process: Pid) {
        self.tell(-process.as_raw_pid());
    }

    fn tell(&self, word: i32) {
        // So few bytes are written at once or not at all; where they are not, the environment still tells.
        let _ = self.alive.as_ref().map(|mut pipe| pipe.write_all(&word.to_ne_bytes()));
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        self.alive = None;
        // Fails only where somebody else has reaped it.
        let _ = self.child.wait();
    }
}

/// Where this process was started as a warden, does its work and exits.
pub(super) fn serve_if_asked() {
    let Some(spawn_id) = std::env::var_os(WARDEN).filter(|id| !id.is_empty()) else { return };
    for process in ranks(std::io::stdin().lock()).into_iter().filter_map(Pid::from_raw) {
        // It may have ended by now.
        let _ = kill_process(process, Signal::KILL);
    }
    end_all_with(&[SPAWN_ID.as_bytes(), b"=", spawn_id.as_encoded_bytes()].concat());
    // A launcher that was killed has left it. There may be none.
    let _ = std::fs::remove_dir_all(JobFolder::place(&spawn_id.to_string_lossy()));
    std::process::exit(0)
}

/// The processes that were added and not removed, once the launcher has closed the other end.
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

/// Kills every process that has this variable, until none is left.
fn end_all_with(variable: &[u8]) {
    let began = Instant::now();
    while processes::kill_all_with(variable) > 0 && began.elapsed() < PATIENCE {
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
