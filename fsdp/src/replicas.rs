//! Checks that replicas of the shards are still equal.

use strategy::{Replicas, check_replicas};

use crate::{Fsdp, Result};

impl<M> Fsdp<M> {
    /// Compares the shards, bit for bit, over the ranks that hold the same: those along the axis `dp` of
    /// [`Fsdp::hybrid`]; all ranks with [`ShardingStrategy::NoShard`](crate::ShardingStrategy::NoShard). Must be called on every rank, at the
    /// same point: occasionally during a long training, or when debugging.
    ///
    /// # Cost
    /// One pass over the shards, and all-gathers of a few bytes. Only if they differ: 8 bytes per parameter, then a broadcast
    /// of one shard.
    ///
    /// # Errors
    /// [`strategy::Error::ParametersDiffer`], the same on every rank, names the first parameter whose
    /// shard differs, the ranks, the element of the shard and both values. Training can continue after it. Failures of
    /// communication.
    pub fn check_parameters(&self) -> Result<()> {
        let core = self.core();
        core.between_passes(|| {
            let mut held = Vec::new();
            if let Some(same_shard) = &core.groups.same_shard {
                held.extend(same_shard.groups().enumerate().map(|(group, among)| {
                    let own = core.params().filter(|param| same_shard.index_of(&param.name) == group);
                    let tensors = own.map(|param| (&*param.name, param.shard.as_tensor())).collect();
                    Replicas { among: Some(&**among), tensors }
                }));
            }
            Ok(check_replicas(&[&**core.groups.world()], &held)?)
        })
    }
}
