//! What each rank holds: all of the model.

use comm::Communicator;
use strategy::{DistributedModel, ModelCopy, Piece};

use crate::{Ddp, Error, Result};

impl<M> DistributedModel for Ddp<M> {
    type Error = Error;

    const NAMED_VARS: &'static str = "Ddp::named_vars";

    fn check(&self) -> Result<()> {
        self.comm().map(drop)
    }

    fn groups(&self) -> Vec<&dyn Communicator> {
        self.comm().into_iter().collect()
    }

    fn partition_groups(&self) -> Vec<&dyn Communicator> {
        Vec::new()
    }

    fn copy(&self) -> ModelCopy {
        ModelCopy::along(self.comm().ok())
    }

    fn pieces(&self) -> Result<Vec<Piece>> {
        let trained = self.named_vars().len();
        let pieces = self
            .state()
            .into_iter()
            .enumerate()
            .map(|(place, (name, var))| Piece { is_buffer: place >= trained, ..Piece::whole(name, var) });
        Ok(pieces.collect())
    }
}
