//! Finds and kills processes that belong to a job, wherever they come from.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Kills every process with this variable, `NAME=value`, in its environment. Returns how many there were.
pub(crate) fn kill_all_with(variable: &[u8]) -> usize {
    let Ok(processes) = std::fs::read_dir("/proc") else { return 0 };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Pid::from_raw).filter(|&pid| kill(pid, variable)).count()
}

fn kill(pid: Pid, variable: &[u8]) -> bool {
    // The pidfd guarantees that the process that is checked is the one that is killed, even if its id is reused. The
    // environment of a process that has ended, or that belongs to another user, cannot be read.
    let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
    let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
    let Ok(environment) = std::fs::read(path) else { return false };
    let ours = environment.split(|&byte| byte == 0).any(|other| other == variable);
    ours && pidfd_send_signal(handle, Signal::KILL).is_ok()
}
