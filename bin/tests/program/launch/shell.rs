//! `launch` of a shell script.

use std::process::{Child, Command};

use rustix::process::Pid;

use crate::common::girandole;

/// `launch` of a shell script on so many ranks.
pub(crate) fn shell(ranks: usize, script: &str) -> Command {
    let mut command = girandole();
    command.args(["launch", "--nproc-per-node", &ranks.to_string(), "--", "sh", "-c", script]);
    command
}

/// The ranks that a launcher has started and that still run.
pub(crate) fn ranks_of(launcher: &Child) -> Vec<Pid> {
    ranks_of_process(launcher.id())
}

/// The same by its process id.
pub(crate) fn ranks_of_process(pid: u32) -> Vec<Pid> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let pids = children.flat_map(|list| list.split_whitespace().map(str::to_string).collect::<Vec<_>>());
    pids.filter(|pid| {
        // The one that tidies up has no rank.
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable.starts_with(b"RANK="))
    })
    .filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
    .collect()
}
