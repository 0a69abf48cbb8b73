//! Who shares a shard with whom.

use std::sync::Arc;

use comm::{Communicator, Mesh, Stats};

use crate::{Error, Result, Strategy};

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

    pub(crate) fn hybrid(mesh: &Mesh, shard: &str, replicate: &str, strategy: Strategy) -> Result<Self> {
        if strategy == Strategy::NoShard {
            return Err(Error::NothingSharded { axis: shard.into() });
        }
        let world = mesh.plane(&[shard, replicate])?;
        let (shard, replicate) = (mesh.axis(shard)?.clone(), mesh.axis(replicate)?.clone());
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

fn several(comm: Option<Arc<dyn Communicator>>) -> Option<Arc<dyn Communicator>> {
    comm.filter(|comm| comm.world_size() > 1)
}
