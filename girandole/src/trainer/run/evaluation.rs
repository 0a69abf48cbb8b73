//! Evaluation during training.

use training::build::Model;

use super::Trainer;
use crate::Result;
use crate::trainer::{Data, Observer, evaluate};

impl<M: Model> Trainer<'_, M> {
    pub(super) fn evaluate(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let Some(data) = self.evaluation else { return Ok(()) };
        let loss = self.evaluate_on(data)?;
        // The observer may change variables.
        self.wait_for_copies();
        observer.evaluated(self.step, loss, self.model)
    }

    /// Computes the mean loss of the first [`TrainConfig::evaluation_rows`](crate::trainer::TrainConfig::evaluation_rows)
    /// rows, as [`evaluate`] does, in batches at most as large as in training.
    ///
    /// # Errors
    /// Those of [`evaluate`].
    pub fn evaluate_on(&mut self, data: &dyn Data) -> Result<f64> {
        let (rows, batch) = (self.config.evaluation_rows, self.config.batch_size);
        Ok(evaluate(self.model, data, rows, batch)?.loss)
    }
}
