//! Positions of ranks: in the world group, on their nodes, and in a table of several nodes.

use comm::{Communicator, host_name};
use experiment::error::Result;
use launch::Layout;

use super::stage::{OrderedOutput, python_bool};

pub(super) fn show(stage: &OrderedOutput<'_>, world: &dyn Communicator, table: Layout) -> Result<()> {
    stage.title("world group")?;
    let (rank, world_size) = (world.rank(), world.world_size());
    let NodePlace { node, local_rank, local_world_size } =
        NodePlace::of(rank, world_size, comm::LaunchedRank::from_env()?);
    let is_member = python_bool(world.world_ranks().contains(&rank));
    stage.each(format_args!(
        "is_initialized True, get_rank {rank}, get_world_size {world_size}, get_backend {}, rank in {:?} {is_member}",
        world.backend(),
        world.world_ranks(),
    ))?;
    // The formula does not hold if nodes have different numbers of ranks, as under Slurm.
    let sum = match node * local_world_size + local_rank == rank {
        true => format!(": {node} x {local_world_size} + {local_rank} = {rank}"),
        false => String::new(),
    };
    stage.each(format_args!("local rank {local_rank} of {local_world_size} on node {node}{sum}"))?;
    stage.each(format_args!("host {}, data {}", host_name(), carriers(world)))?;

    let (nodes, local) = (table.nodes(), table.local_world_size());
    stage.title(format_args!(
        "{nodes} nodes with {local} ranks each: global rank = node x {local} + local rank"
    ))?;
    for node in 0..nodes {
        for rank in table.ranks_of(node) {
            let (node, local_rank) = table.place(rank);
            stage.say(format_args!("node {node}, local rank {local_rank}: global rank {rank}"))?;
        }
    }
    Ok(())
}

/// Describes the transports to the other ranks.
fn carriers(world: &dyn Communicator) -> String {
    if world.backend() != "tcp" {
        return format!("through {}", world.backend().to_uppercase());
    }
    let shared = world.shared_memory_ranks();
    let others: Vec<usize> = (0..world.world_size()).filter(|&other| other != world.rank()).collect();
    let (memory, tcp): (Vec<usize>, Vec<usize>) = others.iter().partition(|other| shared.contains(other));
    match (memory.is_empty(), tcp.is_empty()) {
        (true, true) => "to nobody".into(),
        (true, false) => format!("over TCP with {tcp:?}"),
        (false, true) => format!("through shared memory with {memory:?}"),
        (false, false) => format!("through shared memory with {memory:?}, over TCP with {tcp:?}"),
    }
}

/// A rank's node and its position on it.
#[derive(Debug, PartialEq)]
struct NodePlace {
    node: usize,
    local_rank: usize,
    local_world_size: usize,
}

impl NodePlace {
    /// Takes the values of the launcher's environment (`told`); those that are missing are computed as for one node.
    fn of(rank: usize, world_size: usize, told: Option<comm::LaunchedRank>) -> Self {
        let local_world_size =
            told.as_ref().and_then(|told| told.local_world_size).unwrap_or(world_size).max(1);
        let local_rank = told.as_ref().and_then(|told| told.local_rank).unwrap_or(rank % local_world_size);
        let node = told.and_then(|told| told.node_rank).unwrap_or(rank / local_world_size);
        Self { node, local_rank, local_world_size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_what_is_told_else_one_node() {
        let told = |local_rank, local_world_size, node_rank| {
            Some(comm::LaunchedRank { rank: 5, world_size: 6, local_rank, local_world_size, node_rank })
        };
        let place = |node, local_rank, local_world_size| NodePlace { node, local_rank, local_world_size };
        assert_eq!(NodePlace::of(3, 4, None), place(0, 3, 4));
        assert_eq!(NodePlace::of(3, 4, told(None, Some(2), None)), place(1, 1, 2));
        assert_eq!(NodePlace::of(5, 6, told(Some(1), Some(2), Some(2))), place(2, 1, 2));
    }
}
