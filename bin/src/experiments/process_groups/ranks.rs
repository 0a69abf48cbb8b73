//! Where each rank stands: in the world group, on its node, over several nodes.

use comm::Communicator;
use comm::launch::Layout;

use crate::error::Result;
use crate::start::host_name;

use super::stage::{Stage, word};

pub(super) fn show(stage: &Stage<'_>, world: &dyn Communicator, table: Layout) -> Result<()> {
    stage.title("world group")?;
    let (rank, world_size) = (world.rank(), world.world_size());
    let Place { node, local_rank, local_world_size } = Place::from_env(rank, world_size);
    let is_member = word(world.world_ranks().contains(&rank));
    stage.each(format_args!(
        "is_initialized True, get_rank {rank}, get_world_size {world_size}, get_backend {}, rank in {:?} {is_member}",
        world.backend(),
        world.world_ranks(),
    ))?;
    stage.each(format_args!(
        "local rank {local_rank} of {local_world_size} on node {node}: {node} x {local_world_size} + {local_rank} = {}",
        node * local_world_size + local_rank,
    ))?;
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

/// What carries the data to the other ranks.
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

/// A rank's place on its node, as its launcher tells.
#[derive(Debug, PartialEq)]
struct Place {
    node: usize,
    local_rank: usize,
    local_world_size: usize,
}

impl Place {
    fn from_env(rank: usize, world_size: usize) -> Self {
        Self::from_lookup(rank, world_size, |name| std::env::var(name).ok()?.parse().ok())
    }

    /// Where nothing is told there is one node.
    fn from_lookup(rank: usize, world_size: usize, number: impl Fn(&str) -> Option<usize>) -> Self {
        let local_world_size = number("LOCAL_WORLD_SIZE").filter(|&size| size > 0).unwrap_or(world_size);
        let node = number("GROUP_RANK").or_else(|| number("NODE_RANK"));
        let local_rank = number("LOCAL_RANK").unwrap_or(rank % local_world_size);
        Self { node: node.unwrap_or(rank / local_world_size), local_rank, local_world_size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_what_the_launcher_tells_else_one_node() {
        let told = |pairs: &'static [(&str, usize)]| {
            move |name: &str| pairs.iter().find(|(other, _)| *other == name).map(|(_, number)| *number)
        };
        let place = |node, local_rank, local_world_size| Place { node, local_rank, local_world_size };
        assert_eq!(Place::from_lookup(3, 4, told(&[])), place(0, 3, 4));
        assert_eq!(Place::from_lookup(3, 4, told(&[("LOCAL_WORLD_SIZE", 2)])), place(1, 1, 2));
        let torchrun = &[("LOCAL_RANK", 1), ("GROUP_RANK", 2), ("LOCAL_WORLD_SIZE", 2)];
        assert_eq!(Place::from_lookup(5, 6, told(torchrun)), place(2, 1, 2));
    }
}
