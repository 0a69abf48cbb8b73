//! Slurm: variables of a task of a job step, as `srun` starts it.

use std::net::IpAddr;

use super::node_list::expand;
use super::{LaunchedRank, SchedulerInfo};
use crate::config::variables::Variables;
use crate::{Error, Result};

/// Reads Slurm's variables. `None` where this process is not a task of a step.
pub(super) fn find(env: &Variables<'_>) -> Result<Option<SchedulerInfo>> {
    if env.text("SLURM_PROCID")?.is_none() || !is_task(env)? {
        return Ok(None);
    }
    let rank = env.required("SLURM_PROCID", "a task's number, from 0")?;
    let (world_size_from, world_size) = match env.optional("SLURM_STEP_NUM_TASKS", TASKS)? {
        Some(size) => ("SLURM_STEP_NUM_TASKS", size),
        None => ("SLURM_NTASKS", env.required("SLURM_NTASKS", TASKS)?),
    };
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

/// Returns whether this process is a task. The script of a batch job, which is to start the tasks, and an interactive
/// shell are not.
fn is_task(env: &Variables<'_>) -> Result<bool> {
    let is = |name, value: &str| Ok::<bool, Error>(env.text(name)?.is_some_and(|text| text == value));
    let has_step = env.text("SLURM_STEP_ID")?.is_some();
    let is_script = is("ENVIRONMENT", "BATCH")? && !has_step;
    let is_shell = env.text("SLURM_PTY_PORT")?.is_some() || is("SLURM_JOB_NAME", "interactive")?;
    Ok(!(is_script || is_shell && is("SLURM_NTASKS", "1")?))
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
