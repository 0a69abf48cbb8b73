//! Evaluation during training.

use training::build::Model;

use super::Trainer;
use crate::trainer::{Data, Observer};
use crate::{Error, Result};

impl<M: Model> Trainer<'_, M> {
    pub(super) fn evaluate(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let Some(data) = self.evaluation else { return Ok(()) };
        let loss = self.evaluate_on(data)?;
        // The observer may change variables.
        self.wait_for_copies();
        observer.evaluated(self.step, loss, self.model)
    }

    /// Computes the mean loss of the first [`TrainConfig::evaluation_rows`](crate::trainer::TrainConfig::evaluation_rows) rows, in batches as
    /// large as in training; at least one batch.
    ///
    /// # Errors
    /// Fewer rows than a batch has; rows of which no target counts; errors of the model and the data.
    pub fn evaluate_on(&mut self, data: &dyn Data) -> Result<f64> {
        let (batch, group) = (self.config.batch_size, self.model.data_ranks().clone());
        let batches = data.rows().min(self.config.evaluation_rows.max(batch)) / batch;
        if batches == 0 {
            let help = format!("an evaluation needs {batch} rows, as many as a step");
            return Err(Error::invalid("the rows to evaluate on", data.rows(), help));
        }
        let (mut sum, mut count) = (0.0, 0);
        for first in (0..batches).map(|place| place * batch) {
            let own: Vec<usize> =
                (first..first + batch).skip(group.rank()).step_by(group.world_size()).collect();
            let batch = data.batch(&own, &self.model.config().device.clone()).map_err(Error::from);
            match self.model.evaluate_of(batch) {
                Err(Error::NoTargets) => {}
                evaluation => {
                    let evaluation = evaluation?;
                    sum += evaluation.loss * evaluation.targets as f64;
                    count += evaluation.targets;
                }
            }
        }
        if count == 0 {
            let got = format!("{} rows of which no target counts", batches * batch);
            return Err(Error::invalid("the rows to evaluate on", got, "at least one target must count"));
        }
        Ok(sum / count as f64)
    }
}
