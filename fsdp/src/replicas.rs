//! Checks that replicas of the shards are still equal.

use strategy::{first_of, parameter_difference};

use crate::{Fsdp, Result};

impl<M> Fsdp<M> {
    /// Compares the shards, bit for bit, over the ranks that hold the same: those along the axis `dp` of
    /// [`Fsdp::hybrid`]; all ranks with [`Strategy::NoShard`](crate::Strategy::NoShard). Must be called on every rank, at the
    /// same point: occasionally during a long training, or when debugging.
    ///
    /// # Cost
    /// One pass over the shards, and all-gathers of a few bytes. Only if they differ: 8 bytes per parameter, then a broadcast
    /// of one shard.
    ///
    /// # Errors
    /// [`Error::ParametersDiffer`](crate::Error::ParametersDiffer), the same on every rank, names the first parameter whose
    /// shard differs, the ranks, the element of the shard and both values. Training can continue after it. Failures of
    /// communication.
    pub fn check_parameters(&self) -> Result<()> {
        let core = self.core();
        let found = core.between_passes(|| {
            let shards = core.params().map(|param| (&*param.name, param.shard.as_tensor()));
            let own = match &core.groups.dp {
                Some(copies) => parameter_difference(&**copies, &shards.collect::<Vec<_>>())?,
                None => None,
            };
            Ok(first_of([&*core.groups.world], own)?)
        });
        found?.map_or(Ok(()), |(_, difference)| Err(Box::new(difference).into()))
    }
}
