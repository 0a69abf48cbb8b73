//! Finds and kills processes that belong to a job, wherever they come from.

use rustix::process::{Pid, Signal, kill_process};

use super::apple::{all_processes, environment};
use crate::platform::Killed;

/// Kills every process with this variable, `NAME=value`, in its environment.
pub(crate) fn kill_all_with(variable: &[u8]) -> Killed {
    let pids = all_processes().into_iter().filter(|&pid| pid > 0).filter_map(Pid::from_raw);
    Killed { count: pids.filter(|&pid| kill(pid, variable)).count(), undecided: 0 }
}

/// Kills the process if it has the variable. The environment of a process that has ended, or that belongs to another
/// user, cannot be read.
fn kill(pid: Pid, variable: &[u8]) -> bool {
    let Some(environment) = environment(pid) else { return false };
    let ours = environment.split(|&byte| byte == 0).any(|other| other == variable);
    ours && kill_process(pid, Signal::KILL).is_ok()
}
