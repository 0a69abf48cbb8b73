//! What each rank holds of a sharded model.

use candle_core::Var;
use comm::Communicator;
use strategy::{DistributedModel, ModelCopy, Piece, Region};

use crate::{Error, Fsdp, Result};

impl<M> DistributedModel for Fsdp<M> {
    type Error = Error;

    const NAMED_VARS: &'static str = "Fsdp::named_vars";

    fn check(&self) -> Result<()> {
        self.core().check()
    }

    fn groups(&self) -> Vec<&dyn Communicator> {
        vec![&**self.core().groups.world()]
    }

    fn partition_groups(&self) -> Vec<&dyn Communicator> {
        self.core().groups.shard.iter().chain(&self.norm.others).map(|group| &**group).collect()
    }

    fn copy(&self) -> ModelCopy {
        ModelCopy::along(self.core().groups.same_shard.as_ref().map(|group| &**group.all()))
    }

    fn pieces(&self) -> Result<Vec<Piece>> {
        let units = self.core().units.iter();
        let shards = units.flat_map(|unit| (0..unit.params.len()).map(move |param| (unit, param)));
        let shards = shards.map(|(unit, place)| {
            let param = &unit.params[place];
            let region = Region { window: unit.kept(place), ..Region::whole(param.tensor.dims()) };
            Piece { region, ..Piece::whole(param.name.clone(), param.shard.clone()) }
        });
        let is_first = self.core().groups.shard_rank() == 0;
        let buffers = self.buffers().iter().map(|(name, var)| Piece {
            is_first,
            is_buffer: true,
            ..Piece::whole(name.clone(), var.clone())
        });
        Ok(shards.chain(buffers).collect())
    }

    fn replace<T>(&self, change: impl FnOnce() -> Result<T>) -> Result<T> {
        self.core().replace_shards(change)
    }

    fn counted_vars(&self) -> Result<Vec<Var>> {
        Ok(self.norm.counted.clone().unwrap_or_else(|| self.vars()))
    }
}
