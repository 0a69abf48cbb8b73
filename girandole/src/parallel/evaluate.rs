//! Evaluation of one batch, without backward.

use candle_core::Tensor;
use ops::PairResult;
use strategy::DistributedModel;
use training::build::Model;

use super::micro_batches::Evaluated;
use super::{Evaluation, Parallel};
use crate::{Batch, Result};

impl<M: Model> Parallel<M> {
    /// Computes the mean loss of a batch, without backward. Call on every rank, with rows as for [`step`](Self::step).
    ///
    /// # Errors
    /// Those of [`step`](Self::step).
    pub fn evaluate(&mut self, input: &Tensor, targets: &Tensor) -> Result<Evaluation> {
        self.evaluate_batch(&(input.clone(), targets.clone()).into())
    }

    /// Like [`evaluate`](Self::evaluate), with rows that may be packed.
    ///
    /// # Errors
    /// Those of [`step_batch`](Self::step_batch).
    pub fn evaluate_batch(&mut self, batch: &Batch) -> Result<Evaluation> {
        Ok(self.evaluate_pairs(Ok(batch.clone()), usize::MAX)?.0)
    }

    /// Returns the evaluation, and the results of pairs that this rank has: none in stages before the last.
    fn evaluate_results(
        &mut self,
        batch: Result<Batch>,
        counted: usize,
    ) -> Result<(Evaluation, Vec<PairResult>)> {
        let batch = self.prepare(batch, counted)?;
        let Evaluated { loss, sums, pairs } = self.mean_loss(&batch, false)?;
        let preferences = match &batch.batch.preferences {
            None => None,
            Some(_) => Some(self.report(&pairs, batch.total)?),
        };
        let sums = self.sums_of_all(sums)?;
        Ok((Evaluation { loss, targets: batch.total, sums, preferences }, pairs))
    }

    /// Like [`evaluate_batch`](Self::evaluate_batch), with a batch that this rank may have failed to make, and with the results of this
    /// rank's pairs, in the order of rows. Only the first `counted` of its rows count; the others fill the batch.
    pub(crate) fn evaluate_pairs(
        &mut self,
        batch: Result<Batch>,
        counted: usize,
    ) -> Result<(Evaluation, Vec<PairResult>)> {
        self.check()?;
        let evaluation = self.evaluate_results(batch, counted);
        self.note(evaluation)
    }
}
