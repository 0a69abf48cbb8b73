//! Ends what the ranks' programs have started and left behind, however the launcher ends.
//!
//! A process of its own waits for the launcher's end, its death included. Then it looks for every process that has the
//! id of what this launcher has started in its environment, and kills it.

use std::io::{PipeWriter, Read, pipe};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};

use super::environment::{LISTENER, SPAWN_ID, SPAWNER_PID};
use super::itself;
use crate::{Error, Result};

/// Makes a process a warden; holds that id.
const WARDEN: &str = "GIRANDOLE_WARDEN";

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
        let mut command = itself::command()?;
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
    sweep::end_all_with(&[SPAWN_ID.as_bytes(), b"=", spawn_id.as_encoded_bytes()].concat());
    std::process::exit(0)
}

#[cfg(target_os = "linux")]
mod sweep {
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

    /// Longer than a killed process takes to vanish, unless it hangs in the kernel.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// Kills every process that has this variable, until none is left.
    pub(super) fn end_all_with(variable: &[u8]) {
        let began = Instant::now();
        while kill_all_with(variable) > 0 && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill_all_with(variable: &[u8]) -> usize {
        let Ok(processes) = std::fs::read_dir("/proc") else { return 0 };
        let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter_map(Pid::from_raw).filter(|&pid| kill(pid, variable)).count()
    }

    fn kill(pid: Pid, variable: &[u8]) -> bool {
        // What is looked at and what is killed are one process, whatever becomes of its number. Of one that has ended, or
        // that belongs to somebody else, there is nothing to be read.
        let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
        let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
        let Ok(environment) = std::fs::read(path) else { return false };
        let ours = environment.split(|&byte| byte == 0).any(|other| other == variable);
        ours && pidfd_send_signal(handle, Signal::KILL).is_ok()
    }
}

#[cfg(not(target_os = "linux"))]
mod sweep {
    /// Other systems do not tell the environment of a process.
    pub(super) fn end_all_with(_: &[u8]) {}
}
