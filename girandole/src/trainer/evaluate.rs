//! The loss of a model on rows that it is not trained on.

use training::build::Model;

use super::{Data, Observer, Trainer};
use crate::parallel::added;
use crate::{Error, Evaluation, Parallel, Result};

/// Computes the mean loss of a model over the targets of the first `rows` rows, or of all if there are fewer. Call on
/// every rank.
///
/// The rows are exactly these, whatever the layout and the size of batches: the last batch is filled with rows that do
/// not count. A batch has `batch_size` rows over all ranks or, with `pp`, as many as stages have room for.
///
/// # Errors
/// No rows; rows of which no target counts; errors of the model and the data.
pub fn evaluate<M: Model>(
    model: &mut Parallel<M>,
    data: &dyn Data,
    rows: usize,
    batch_size: usize,
) -> Result<Evaluation> {
    let rows = rows.min(data.rows());
    if rows == 0 {
        return Err(Error::invalid("the rows to evaluate on", 0, "give 1 or more"));
    }
    let (rank, ranks) = (model.data_ranks().rank(), model.data_ranks().world_size());
    let device = model.config().device.clone();
    let (mut sum, mut targets, mut first, mut sums) = (0.0, 0, 0, Vec::new());
    while first < rows {
        let each = rows_of_rank(model, batch_size, rows - first).max(1);
        // Rows are assigned to the ranks in turn; those beyond the end stand for the last one.
        let own = (0..each).map(|place| first + place * ranks + rank);
        let counted = own.clone().filter(|row| *row < rows).count();
        let own: Vec<usize> = own.map(|row| row.min(rows - 1)).collect();
        let batch = data.batch(&own, &device).map_err(Error::from);
        match model.evaluate_of(batch, counted) {
            Err(Error::NoTargets) => {}
            evaluation => {
                let evaluation = evaluation?;
                sum += evaluation.loss * evaluation.targets as f64;
                targets += evaluation.targets;
                sums = added(sums, evaluation.sums);
            }
        }
        first += each * ranks;
    }
    if targets == 0 {
        let got = format!("{rows} rows of which no target counts");
        return Err(Error::invalid("the rows to evaluate on", got, "at least one target must count"));
    }
    Ok(Evaluation { loss: sum / targets as f64, targets, sums })
}

/// Returns the rows that each rank computes of a batch, of which there may be fewer: those for which stages have room,
/// always the same number, or no more than are needed.
fn rows_of_rank<M: Model>(model: &Parallel<M>, batch_size: usize, left: usize) -> usize {
    let (parts, ranks) = (model.config().micro_batches, model.data_ranks().world_size());
    let room = model.config().example.as_ref().and_then(|example| example.dims().first());
    match room {
        _ if model.layout().pp == 1 => batch_size.min(left).div_ceil(ranks).max(parts),
        Some(rows) => rows * parts,
        None => batch_size.div_ceil(ranks).next_multiple_of(parts),
    }
}

impl<M: Model> Trainer<'_, M> {
    pub(super) fn evaluate(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let Some(data) = self.evaluation else { return Ok(()) };
        let (rows, batch) = (self.config.evaluation_rows, self.config.batch_size);
        let evaluation = evaluate(self.model, data, rows, batch)?;
        // The observer may change variables.
        self.wait_for_copies();
        observer.evaluated(self.done.step, &evaluation, self.model)
    }

    /// Computes the mean loss of the first [`TrainConfig::evaluation_rows`](super::TrainConfig::evaluation_rows)
    /// rows, as [`evaluate`] does, in batches at most as large as in training.
    ///
    /// # Errors
    /// Those of [`evaluate`].
    pub fn evaluate_on(&mut self, data: &dyn Data) -> Result<f64> {
        let (rows, batch) = (self.config.evaluation_rows, self.config.batch_size);
        Ok(evaluate(self.model, data, rows, batch)?.loss)
    }
}
