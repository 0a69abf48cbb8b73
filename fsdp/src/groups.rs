//! Who shares a shard with whom.

use std::sync::Arc;

use comm::{Communicator, Mesh, Stats};

use crate::{Result, Strategy};

/// The groups of a model.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    /// All ranks of this model.
    pub(crate) world: Arc<dyn Communicator>,
    /// Those that each have a part of the parameters; none where each rank has all.
    pub(crate) shard: Option<Arc<dyn Communicator>>,
    /// Those that have the same part; none where no other has.
    pub(crate) replicate: Option<Arc<dyn Communicator>>,
}

impl Groups {
    pub(crate) fn flat(world: Arc<dyn Communicator>, strategy: Strategy) -> Self {
        let all = Some(world.clone());
        let (shard, replicate) = if strategy == Strategy::NoShard { (None, all) } else { (all, None) };
        Self { world, shard: several(shard), replicate: several(replicate) }
    }

    pub(crate) fn hybrid(mesh: &Mesh, shard: &str, replicate: &str) -> Result<Self> {
        let axes: Vec<_> = mesh.axes().collect();
        let ranks = plane(&axes, &mesh.coordinates(), [shard, replicate]);
        let (shard, replicate) = (mesh.axis(shard)?.clone(), mesh.axis(replicate)?.clone());
        let world = match ranks.len() == mesh.world().world_size() {
            true => mesh.world().clone(),
            false => mesh.world().subgroup(&ranks)?,
        };
        Ok(Self { world, shard: several(Some(shard)), replicate: several(Some(replicate)) })
    }

    /// What this rank has sent and received in them; the group of all may be one of the others.
    pub(crate) fn stats(&self) -> Stats {
        let others = [&self.shard, &self.replicate].into_iter().flatten();
        let others = others.filter(|comm| !Arc::ptr_eq(comm, &self.world));
        others.fold(self.world.stats(), |sum, comm| sum + comm.stats())
    }

    /// Into how many parts parameters are cut.
    pub(crate) fn shards(&self) -> usize {
        self.shard.as_ref().map_or(1, |comm| comm.world_size())
    }

    /// Which of them is this rank's.
    pub(crate) fn shard_rank(&self) -> usize {
        self.shard.as_ref().map_or(0, |comm| comm.rank())
    }
}

/// The ranks of a mesh that differ from the one at `own` in the axes `free` alone, in order.
fn plane(axes: &[(&str, usize)], own: &[usize], free: [&str; 2]) -> Vec<usize> {
    let mut ranks = vec![0];
    // The last axis is the one whose neighbours are neighbours in rank.
    for ((name, size), own) in axes.iter().zip(own) {
        let places = if free.contains(name) { 0..*size } else { *own..own + 1 };
        ranks = ranks.iter().flat_map(|rank| places.clone().map(move |place| rank * size + place)).collect();
    }
    ranks
}

fn several(comm: Option<Arc<dyn Communicator>>) -> Option<Arc<dyn Communicator>> {
    comm.filter(|comm| comm.world_size() > 1)
}

#[cfg(test)]
mod tests {
    use super::plane;

    #[test]
    fn a_plane_goes_through_its_own_rank() {
        let axes = [("pp", 2), ("replicate", 3), ("shard", 2)];
        let free = ["shard", "replicate"];
        assert_eq!(plane(&axes, &[0, 1, 1], free), [0, 1, 2, 3, 4, 5]);
        assert_eq!(plane(&axes, &[1, 0, 0], free), [6, 7, 8, 9, 10, 11]);
        assert_eq!(plane(&axes, &[0, 2, 1], ["pp", "shard"]), [4, 5, 10, 11]);
        assert_eq!(plane(&axes, &[1, 2, 1], ["pp", "replicate"]), [1, 3, 5, 7, 9, 11]);
    }
}
