//! The batches of a copy of the pipeline.

use cli::prelude::*;
use cli::trainer::{self, Position, Source};

use crate::documents::shared::transformer::rows::Batch;

/// The batches of an epoch, the same in every epoch.
pub(super) struct Batches(pub(super) Vec<Batch>);

impl Source for Batches {
    type Batch = Batch;

    fn remaining(&self, at: Position) -> usize {
        self.0.len().saturating_sub(at.batch)
    }

    fn batches(&mut self, at: Position) -> Result<trainer::Batches<Batch>> {
        let left: Vec<Batch> = self.0.iter().skip(at.batch).cloned().collect();
        Ok(Box::new(left.into_iter().map(Ok)))
    }

    fn changed(&self, then: usize) -> String {
        format!("; it was made with world size {then}, the model is cut again")
    }
}
