//! Positions of ranks: in the world group, on their nodes, and in a table of several nodes.

use cli::prelude::*;
use comm::internal::host_name;
use comm::{Communicator, LaunchedRank};
use launch::NodeLayout;

use super::stage::{OrderedOutput, python_bool};

pub(super) fn show(stage: &OrderedOutput<'_>, world: &dyn Communicator, table: NodeLayout) -> Result<()> {
    stage.title("world group")?;
    let (rank, world_size) = (world.rank(), world.world_size());
    let (node, local_rank, local_world_size) = place(rank, world_size, LaunchedRank::from_env()?);
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
            let (node, local_rank) = table.node_and_local_rank(rank);
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

/// Returns a rank's node, its number there, and the number of ranks there: the values of the launcher's environment
/// (`told`); those that are missing are computed as for one node.
fn place(rank: usize, world_size: usize, told: Option<LaunchedRank>) -> (usize, usize, usize) {
    let told = told.map(|told| (told.node_rank, told.local_rank, told.local_world_size));
    let (node, local_rank, local_world_size) = told.unwrap_or_default();
    let local_world_size = local_world_size.unwrap_or(world_size).max(1);
    let (its_node, its_number) = (rank / local_world_size, rank % local_world_size);
    (node.unwrap_or(its_node), local_rank.unwrap_or(its_number), local_world_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_what_is_told_else_one_node() {
        let told = |local_rank, local_world_size, node_rank| {
            Some(LaunchedRank { rank: 5, world_size: 6, local_rank, local_world_size, node_rank })
        };
        assert_eq!(place(3, 4, None), (0, 3, 4));
        assert_eq!(place(3, 4, told(None, Some(2), None)), (1, 1, 2));
        assert_eq!(place(5, 6, told(Some(1), Some(2), Some(2))), (2, 1, 2));
    }
}
