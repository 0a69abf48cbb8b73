//! Slurm: variables of a task of a job step, as `srun` starts it.

use std::net::IpAddr;

use super::node_list::expand;
use super::{LaunchedRank, SchedulerInfo};
use crate::config::variables::Variables;
use crate::{Error, Result};

/// Reads Slurm's variables. `None` where this process is not a task of a step.
pub(super) fn find(env: &Variables<'_>) -> Result<Option<SchedulerInfo>> {
    if env.text("SLURM_PROCID")?.is_none() || is_script(env)? {
        return Ok(None);
    }
    let rank: usize = env.required("SLURM_PROCID", "a task's number, from 0")?;
    let (world_size_from, world_size) = match env.optional("SLURM_STEP_NUM_TASKS", TASKS)? {
        Some(size) => ("SLURM_STEP_NUM_TASKS", size),
        None => ("SLURM_NTASKS", env.required("SLURM_NTASKS", TASKS)?),
    };
    match Shell::find(env)? {
        Some(_) if world_size == 1 => return Ok(None),
        Some(Shell { sign, is_sure: true }) => {
            return Err(refuse_shell(rank, world_size_from, world_size, &sign));
        }
        _ => {}
    }
    let (nodes_from, nodes) = first_of(env, ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"])?;
    let nodes = nodes.map(|list| expand(&list).map_err(|help| Error::invalid(nodes_from, list, help)));
    let nodes = nodes.transpose()?.unwrap_or_default();
    let (tasks_from, tasks) = first_of(env, ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"])?;
    let tasks = tasks.map(|text| counts(&text).ok_or_else(|| Error::invalid(tasks_from, text, COUNTS)));
    let tasks = tasks.transpose()?.unwrap_or_default();
    let node_rank = env.optional("SLURM_NODEID", "a node's number, from 0")?;
    let local_world_size = match node_rank {
        Some(node) => tasks.get(node).copied(),
        None => tasks.first().copied().filter(|first| tasks.iter().all(|other| other == first)),
    };
    let local_rank: Option<usize> = env.optional("SLURM_LOCALID", "a task's number on its node, from 0")?;
    if let (Some(local), Some(size)) = (local_rank, local_world_size)
        && local >= size
    {
        let help =
            format!("with {size} tasks on this node ({tasks_from}), give 0 to {}", size.saturating_sub(1));
        return Err(Error::invalid("SLURM_LOCALID", local, help));
    }
    let [job, step] = [env.text("SLURM_JOB_ID")?, env.text("SLURM_STEP_ID")?].map(Option::unwrap_or_default);
    Ok(Some(SchedulerInfo {
        place: LaunchedRank { rank, world_size, local_rank, local_world_size, node_rank },
        rank_from: "SLURM_PROCID",
        world_size_from,
        host: host(env, nodes)?.ok_or("Slurm names no nodes: set it to the host of rank 0"),
        port_from: None,
        job: Some(format!("slurm-{job}.{step}")),
    }))
}

const TASKS: &str = "the number of tasks, from 1";
const COUNTS: &str = "give numbers of tasks, such as 4(x2),3";

/// Returns whether this process belongs to the script of a batch job, which is to start the tasks and is none.
fn is_script(env: &Variables<'_>) -> Result<bool> {
    let is_batch = env.text("ENVIRONMENT")?.is_some_and(|kind| kind == "BATCH");
    Ok(is_batch && env.text("SLURM_STEP_ID")?.is_none())
}

/// Signs that this process was started in an interactive shell, which is a task in name only.
struct Shell {
    /// The variable that says so, with its value.
    sign: String,
    /// Whether the step runs a shell. A program on a terminal (`srun --pty PROGRAM`) has some of the variables, too.
    is_sure: bool,
}

/// Names under which Slurm runs a step that is a shell.
const SHELLS: [&str; 9] = ["interactive", "bash", "sh", "zsh", "fish", "dash", "ksh", "tcsh", "csh"];

impl Shell {
    fn find(env: &Variables<'_>) -> Result<Option<Self>> {
        let name = env.text("SLURM_JOB_NAME")?;
        let shell = name.as_deref().filter(|name| SHELLS.contains(name));
        let (port, is_interactive) = (env.text("SLURM_PTY_PORT")?, shell == Some("interactive"));
        if port.is_none() && !is_interactive {
            return Ok(None);
        }
        // What the step runs itself is no shell's child.
        let own = std::process::id().to_string();
        let is_sure = shell.is_some() && env.text("SLURM_TASK_PID")?.is_none_or(|task| task != own);
        let port = port.map(|port| format!("SLURM_PTY_PORT={port}"));
        let name = shell.map(|shell| format!("SLURM_JOB_NAME={shell}"));
        let sign = [port, name].into_iter().flatten().collect::<Vec<_>>().join(" and ");
        Ok(Some(Self { sign, is_sure }))
    }
}

/// Returns the error of a program that is started in an interactive shell whose step has several tasks: the other tasks
/// would never come.
fn refuse_shell(rank: usize, from: &str, tasks: usize, sign: &str) -> Error {
    let help = format!(
        "with {from}={tasks} this would be task {rank} of {tasks}, but {sign} says that it is an interactive shell, where \
         the others do not come: put srun before the command to start all of them, or env -u SLURM_PROCID to start ranks \
         of its own here"
    );
    Error::invalid("SLURM_PROCID", rank, help)
}

fn first_of<const N: usize>(
    env: &Variables<'_>,
    names: [&'static str; N],
) -> Result<(&'static str, Option<String>)> {
    for name in names {
        if let Some(text) = env.text(name)? {
            return Ok((name, Some(text)));
        }
    }
    Ok((names[0], None))
}

/// Returns the host of rank 0, which is the first node. Where the step was started from loopback, all nodes are this
/// machine, and their names may not resolve: then it is that loopback address.
fn host(env: &Variables<'_>, nodes: Vec<String>) -> Result<Option<String>> {
    let from: Option<IpAddr> = env.optional("SLURM_LAUNCH_NODE_IPADDR", "an IP address")?;
    Ok(match from.filter(|address| address.to_canonical().is_loopback()) {
        Some(address) => Some(address.to_string()),
        None => nodes.into_iter().next(),
    })
}

/// Expands Slurm's notation for numbers of tasks: `4(x2),3` is 4, 4 and 3.
fn counts(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        let count: usize = count.parse().ok()?;
        if times > 1 << 16 || all.len() > 1 << 16 {
            return None;
        }
        all.extend(std::iter::repeat_n(count, times));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_of_each_node() {
        assert_eq!(counts("4(x2),3"), Some(vec![4, 4, 3]));
        assert_eq!(counts("1"), Some(vec![1]));
        for wrong in ["", "x", "2(x", "2(x3", "2x3", "(x3)", "1,,2", "2(x99999999)"] {
            assert_eq!(counts(wrong), None, "{wrong}");
        }
    }
}
