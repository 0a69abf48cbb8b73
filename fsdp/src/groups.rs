//! Process groups of a model: which ranks form a shard group and which a replica group (hybrid sharding).

use std::sync::Arc;

use comm::{Communicator, Mesh, Stats};
use strategy::ReplicaGroups;

use crate::{Error, Result, ShardingStrategy};

/// The process groups of a model.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    /// All ranks of this model; of each parameter, those that have a part of it.
    pub(crate) owners: ReplicaGroups,
    /// Ranks that each hold a different shard of the parameters; `None` where each rank holds everything.
    pub(crate) shard: Option<Arc<dyn Communicator>>,
    /// Ranks that hold the same shard of a parameter; `None` where no other rank does.
    pub(crate) dp: Option<ReplicaGroups>,
}

impl Groups {
    pub(crate) fn flat(world: Arc<dyn Communicator>, strategy: ShardingStrategy) -> Self {
        let all = Some(world.clone());
        let (shard, dp) = if strategy == ShardingStrategy::NoShard { (None, all) } else { (all, None) };
        Self::new(shard, ReplicaGroups::of(world), dp.map(ReplicaGroups::of))
    }

    pub(crate) fn hybrid(mesh: &Mesh, shard: &str, dp: &str, strategy: ShardingStrategy) -> Result<Self> {
        if strategy == ShardingStrategy::NoShard {
            return Err(Error::NothingSharded { axis: shard.into() });
        }
        let world = mesh.plane(&[shard, dp])?;
        let (shard, dp) = (mesh.axis(shard)?.clone(), mesh.axis(dp)?.clone());
        Ok(Self::new(Some(shard), ReplicaGroups::of(world), Some(ReplicaGroups::of(dp))))
    }

    pub(crate) fn new(
        shard: Option<Arc<dyn Communicator>>,
        owners: ReplicaGroups,
        dp: Option<ReplicaGroups>,
    ) -> Self {
        let shard = shard.filter(|comm| comm.world_size() > 1);
        Self { shard, owners, dp: dp.filter(|copies| copies.all().world_size() > 1) }
    }

    /// All ranks of this model.
    pub(crate) fn world(&self) -> &Arc<dyn Communicator> {
        self.owners.all()
    }

    /// Returns this rank's traffic in all groups. Several of them may be the same communicator, which is counted once.
    pub(crate) fn stats(&self) -> Stats {
        let copies = self.dp.iter().flat_map(ReplicaGroups::groups);
        let all: Vec<_> = self.owners.groups().chain(&self.shard).chain(copies).collect();
        let is_new = |(index, comm): &(usize, &&Arc<dyn Communicator>)| {
            !all[..*index].iter().any(|before| Arc::ptr_eq(before, comm))
        };
        all.iter().enumerate().filter(is_new).fold(Stats::default(), |sum, (_, comm)| sum + comm.stats())
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
