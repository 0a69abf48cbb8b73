//! What each rank holds of a divided model.

use comm::Communicator;
use strategy::{DistributedModel, ModelCopy, Piece, Region};

use crate::{Error, Parameter, Result, Split, TensorParallel};

impl<M> DistributedModel for TensorParallel<M> {
    type Error = Error;

    const NAMED_VARS: &'static str = "TensorParallel::named_vars";

    fn check(&self) -> Result<()> {
        self.check_failed()
    }

    fn groups(&self) -> Vec<&dyn Communicator> {
        vec![self.world()]
    }

    fn partition_groups(&self) -> Vec<&dyn Communicator> {
        vec![&**self.context().comm()]
    }

    fn copy(&self) -> ModelCopy {
        ModelCopy::along(self.dp().map(|dp| &**dp))
    }

    fn pieces(&self) -> Result<Vec<Piece>> {
        let (rank, ranks) = (self.context().rank(), self.context().ranks());
        let piece = |parameter: &Parameter| {
            let dims = parameter.dims().to_vec();
            let runs = parameter.split().runs(&dims, rank, ranks);
            let region = Region { dims, runs, window: 0..runs.len * runs.count };
            let is_first = rank == 0 || parameter.split() != Split::Whole;
            Piece { region, is_first, ..Piece::whole(parameter.name().to_string(), parameter.var().clone()) }
        };
        Ok(self.parameters().iter().map(piece).collect())
    }
}
