//! Process groups of a model: who has the shards of a parameter, and who the same shard (hybrid sharding).

use std::sync::Arc;

use comm::{Communicator, Mesh};
use strategy::ParameterGroups;

use crate::{Error, Result, ShardingStrategy};

/// The process groups of a model.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    /// Of each parameter, the ranks over which its gradient is averaged: all that have a part of it. Together, all ranks of this model.
    pub(crate) averaged_over: ParameterGroups,
    /// Ranks that each hold a different shard of the parameters; `None` where each rank holds everything.
    pub(crate) shard: Option<Arc<dyn Communicator>>,
    /// Ranks that hold the same shard of a parameter; `None` where no other rank does.
    pub(crate) same_shard: Option<ParameterGroups>,
}

impl Groups {
    pub(crate) fn flat(world: Arc<dyn Communicator>, strategy: ShardingStrategy) -> Self {
        let all = Some(world.clone());
        let (shard, dp) = if strategy == ShardingStrategy::NoShard { (None, all) } else { (all, None) };
        Self::new(shard, ParameterGroups::of(world), dp.map(ParameterGroups::of))
    }

    pub(crate) fn hybrid(mesh: &Mesh, shard: &str, dp: &str, strategy: ShardingStrategy) -> Result<Self> {
        if strategy == ShardingStrategy::NoShard {
            return Err(Error::NothingSharded { axis: shard.into() });
        }
        let world = mesh.plane(&[shard, dp])?;
        let (shard, dp) = (mesh.axis(shard)?.clone(), mesh.axis(dp)?.clone());
        Ok(Self::new(Some(shard), ParameterGroups::of(world), Some(ParameterGroups::of(dp))))
    }

    pub(crate) fn new(
        shard: Option<Arc<dyn Communicator>>,
        averaged_over: ParameterGroups,
        same_shard: Option<ParameterGroups>,
    ) -> Self {
        let shard = shard.filter(|comm| comm.world_size() > 1);
        Self { shard, averaged_over, same_shard: same_shard.filter(|group| group.all().world_size() > 1) }
    }

    /// All ranks of this model.
    pub(crate) fn world(&self) -> &Arc<dyn Communicator> {
        self.averaged_over.all()
    }

    /// All groups. Several of them may be the same communicator.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        let same_shard = self.same_shard.iter().flat_map(ParameterGroups::groups);
        self.averaged_over.groups().chain(&self.shard).chain(same_shard)
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
