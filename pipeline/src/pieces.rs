//! What each rank holds: the parameters and buffers of its stages.

use std::collections::HashMap;

use candle_core::Var;
use comm::Communicator;
use strategy::{DistributedModel, ModelCopy, Piece, Region};

use crate::{Error, Pipeline, Result};

impl DistributedModel for Pipeline {
    type Error = Error;

    const NAMED_VARS: &'static str = "Pipeline::named_vars";

    fn check(&self) -> Result<()> {
        self.failed().map_or(Ok(()), |first| Err(first.clone()))
    }

    fn groups(&self) -> Vec<&dyn Communicator> {
        self.groups().all().collect()
    }

    fn partition_groups(&self) -> Vec<&dyn Communicator> {
        self.groups().tp.iter().chain([&self.groups().pp]).map(|group| &**group).collect()
    }

    fn copy(&self) -> ModelCopy {
        ModelCopy::along(self.groups().same_stages().map(|group| &**group))
    }

    fn pieces(&self) -> Result<Vec<Piece>> {
        self.pieces_for("a checkpoint, or a file of the model,")
    }

    fn ties(&self) -> HashMap<String, String> {
        self.tied_names().clone()
    }

    fn counted_vars(&self) -> Result<Vec<Var>> {
        let pieces = self.pieces_for("the norm of gradients")?.into_iter();
        Ok(pieces.filter(|piece| piece.is_first && !piece.is_buffer).map(|piece| piece.var).collect())
    }
}

impl Pipeline {
    fn pieces_for(&self, what: &'static str) -> Result<Vec<Piece>> {
        let divided = self.divided_for(what)?;
        let is_first = self.groups().tp.as_ref().is_none_or(|tp| tp.rank() == 0);
        let parameters = self.named_vars().into_iter().map(|(var_name, var)| {
            let region = divided.get(&var.id()).cloned();
            let root = self.tied_names().get(&var_name);
            let is_first = (is_first || region.is_some()) && root.is_none();
            let region = region.unwrap_or_else(|| Region::whole(var.dims()));
            let name = root.unwrap_or(&var_name).clone();
            Piece { name, var_name, region, var, is_first, is_buffer: false }
        });
        let buffers = self.buffers().iter().map(|(name, var)| Piece {
            is_first,
            is_buffer: true,
            ..Piece::whole(name.clone(), var.clone())
        });
        Ok(parameters.chain(buffers).collect())
    }
}
