//! Process groups of a model: which ranks form a shard group and which a replica group (hybrid sharding).

use std::sync::Arc;

use comm::{Communicator, Mesh, Stats};

use crate::{Error, Result, ShardingStrategy};

/// The process groups of a model.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    /// All ranks of this model.
    pub(crate) world: Arc<dyn Communicator>,
    /// Ranks that each hold a different shard of the parameters; `None` where each rank holds everything.
    pub(crate) shard: Option<Arc<dyn Communicator>>,
    /// Ranks that hold the same shard; `None` where no other rank does.
    pub(crate) dp: Option<Arc<dyn Communicator>>,
}

impl Groups {
    pub(crate) fn flat(world: Arc<dyn Communicator>, strategy: ShardingStrategy) -> Self {
        let all = Some(world.clone());
        let (shard, dp) = if strategy == ShardingStrategy::NoShard { (None, all) } else { (all, None) };
        Self { world, shard: non_trivial(shard), dp: non_trivial(dp) }
    }

    pub(crate) fn hybrid(mesh: &Mesh, shard: &str, dp: &str, strategy: ShardingStrategy) -> Result<Self> {
        if strategy == ShardingStrategy::NoShard {
            return Err(Error::NothingSharded { axis: shard.into() });
        }
        let world = mesh.plane(&[shard, dp])?;
        let (shard, dp) = (mesh.axis(shard)?.clone(), mesh.axis(dp)?.clone());
        Ok(Self { world, shard: non_trivial(Some(shard)), dp: non_trivial(Some(dp)) })
    }

    /// Returns this rank's traffic in all groups. `world` may be the same communicator as one of the others, and is counted
    /// once.
    pub(crate) fn stats(&self) -> Stats {
        let others = [&self.shard, &self.dp].into_iter().flatten();
        let others = others.filter(|comm| !Arc::ptr_eq(comm, &self.world));
        others.fold(self.world.stats(), |sum, comm| sum + comm.stats())
    }

    /// Returns the number of shards.
    pub(crate) fn shards(&self) -> usize {
        self.shard.as_ref().map_or(1, |comm| comm.world_size())
    }

    /// Returns the index of this rank's shard.
    pub(crate) fn shard_rank(&self) -> usize {
        self.shard.as_ref().map_or(0, |comm| comm.rank())
    }
}

fn non_trivial(comm: Option<Arc<dyn Communicator>>) -> Option<Arc<dyn Communicator>> {
    comm.filter(|comm| comm.world_size() > 1)
}
