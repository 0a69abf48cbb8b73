//! Helpers to `launch` shell scripts.

use std::process::{Child, Command};

use rustix::process::Pid;

use crate::common::girandole;

/// Returns a `launch` of a shell script on `ranks` ranks.
pub(crate) fn shell(ranks: usize, script: &str) -> Command {
    let mut command = girandole();
    command.args(["launch", "--nproc-per-node", &ranks.to_string(), "--", "sh", "-c", script]);
    command
}

/// Returns the running ranks of a launcher.
pub(crate) fn ranks_of(launcher: &Child) -> Vec<Pid> {
    ranks_of_process(launcher.id())
}

/// Returns the running ranks of a launcher, given its process id.
pub(crate) fn ranks_of_process(pid: u32) -> Vec<Pid> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let pids = children.flat_map(|list| list.split_whitespace().map(str::to_string).collect::<Vec<_>>());
    pids.filter(|pid| {
        // The launcher's cleanup process has no rank.
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable.starts_with(b"RANK="))
    })
    .filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
    .collect()
}
