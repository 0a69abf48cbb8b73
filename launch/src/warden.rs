//! Ends what the ranks' programs have started and left behind, however the launcher ends.
//!
//! A process of its own waits for the launcher's end, its death included. Then it looks for every process that has the
//! id of what this launcher has started in its environment, and kills it.

use std::io::{PipeWriter, Read, pipe};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use comm::launcher::{LISTENER, SPAWNER_PID};
use comm::{Error, Result};

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
    let mut nothing = Vec::new();
    // Ends when the launcher has closed the other end; nothing is ever written there.
    let _ = std::io::stdin().read_to_end(&mut nothing);
    end_all_with(&[SPAWN_ID.as_bytes(), b"=", spawn_id.as_encoded_bytes()].concat());
    std::process::exit(0)
}

/// Kills every process that has this variable, until none is left.
fn end_all_with(variable: &[u8]) {
    let began = Instant::now();
    while processes::kill_all_with(variable) > 0 && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
}
