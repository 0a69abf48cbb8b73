//! The loss of a model on rows that it is not trained on.

use comm::all_gather_object;
use ops::PairResult;
use training::build::Model;

use super::rounds::LossesOfGroups;
use super::{Data, Observer, Trainer};
use crate::parallel::added;
use crate::{Error, Evaluation, Parallel, PreferenceReport, Result};

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
    evaluate_unless(model, data, rows, batch_size, &|| Ok(()))
}

/// As [`evaluate`], but asks before each batch whether it is to fail.
fn evaluate_unless<M: Model>(
    model: &mut Parallel<M>,
    data: &dyn Data,
    rows: usize,
    batch_size: usize,
    fails: &dyn Fn() -> Result<()>,
) -> Result<Evaluation> {
    let rows = rows.min(data.rows());
    if rows == 0 {
        return Err(Error::invalid("the rows to evaluate on", 0, "give 1 or more"));
    }
    let (mut sum, mut targets, mut sums) = (0.0, 0, Vec::new());
    let mut preferences: Option<PreferenceReport> = None;
    for_each_batch(model, data, rows, batch_size, fails, |_, evaluation, _| {
        sum += evaluation.loss * evaluation.targets as f64;
        targets += evaluation.targets;
        sums = added(std::mem::take(&mut sums), evaluation.sums);
        preferences = match (preferences, evaluation.preferences) {
            (Some(own), Some(more)) => Some(own.merged(more)),
            (own, more) => own.or(more),
        };
    })?;
    if targets == 0 {
        let got = format!("{rows} rows of which no target counts");
        return Err(Error::invalid("the rows to evaluate on", got, "at least one target must count"));
    }
    // A mean over cross-entropies is another one than that over pairs.
    let of_pairs = preferences.map(|pairs| pairs.loss + pairs.cross_entropy.0);
    Ok(Evaluation { loss: of_pairs.unwrap_or(sum / targets as f64), targets, sums, preferences })
}

/// The log-probabilities of both answers of each pair of the first `rows` rows, by row, in a model: those of a reference, for
/// [`PreferenceData`](super::PreferenceData). Later rows have none. Call on every rank; each gets those of all.
///
/// # Errors
/// Data without pairs; errors of the model and the data.
pub fn pair_log_probs<M: Model>(
    model: &mut Parallel<M>,
    data: &dyn Data,
    rows: usize,
    batch_size: usize,
) -> Result<Vec<Vec<[f64; 2]>>> {
    // As bits: all ranks have the same numbers.
    let mut own: Vec<(usize, Vec<[u64; 2]>)> = Vec::new();
    let first = rows.min(data.rows());
    for_each_batch(model, data, first, batch_size, &|| Ok(()), |rows, _, pairs| {
        let mut pairs = pairs.into_iter();
        for (row, count) in rows {
            let of_row: Vec<[u64; 2]> =
                pairs.by_ref().take(count).map(|pair| pair.log_probs.map(f64::to_bits)).collect();
            if of_row.len() == count {
                own.push((row, of_row));
            }
        }
    })?;
    let mut all: Vec<Vec<[f64; 2]>> = vec![Vec::new(); data.rows()];
    for (row, pairs) in all_gather_object(&**model.mesh().world(), &own)?.into_iter().flatten() {
        all[row] = pairs.into_iter().map(|pair| pair.map(f64::from_bits)).collect();
    }
    match all[..first].iter().position(Vec::is_empty) {
        Some(row) => {
            Err(Error::invalid("the pairs of the data", format!("none in row {row}"), "give rows of pairs"))
        }
        None => Ok(all),
    }
}

/// Evaluates the first `rows` rows, and calls `each` for every batch with targets: with this rank's rows, each with the number of its
/// pairs, and the results of those that this rank has. `fails` is asked before each batch.
fn for_each_batch<M: Model>(
    model: &mut Parallel<M>,
    data: &dyn Data,
    rows: usize,
    batch_size: usize,
    fails: &dyn Fn() -> Result<()>,
    mut each: impl FnMut(Vec<(usize, usize)>, Evaluation, Vec<PairResult>),
) -> Result<()> {
    let (rank, ranks) = (model.data_ranks().rank(), model.data_ranks().world_size());
    let device = model.config().device.clone();
    let mut first = 0;
    while first < rows {
        fails()?;
        let own_rows = rows_of_rank(model, batch_size, rows - first).max(1);
        // Rows are assigned to the ranks in turn; those beyond the end stand for the last one.
        let own = (0..own_rows).map(|place| first + place * ranks + rank);
        let counted = own.clone().filter(|row| *row < rows).count();
        let own: Vec<usize> = own.map(|row| row.min(rows - 1)).collect();
        let batch = data.batch(&own, &device).map_err(Error::from);
        let pairs = batch.as_ref().ok().and_then(|batch| batch.preferences.as_ref());
        let of_row = |at: usize| pairs.map_or(0, |pairs| pairs.part(at..at + 1).pairs(1));
        let counts = own.iter().enumerate().take(counted).map(|(at, row)| (*row, of_row(at))).collect();
        match model.evaluate_pairs(batch, counted) {
            Err(Error::NoTargets) => {}
            evaluation => {
                let (evaluation, pairs) = evaluation?;
                each(counts, evaluation, pairs);
            }
        }
        first += own_rows * ranks;
    }
    Ok(())
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
        // Other groups wait for this one to go on without a rank that is lost. The evaluation is repeated then.
        let losses = self.losses_of_groups();
        let fails = || losses.as_ref().map_or(Ok(()), LossesOfGroups::check);
        let evaluation = evaluate_unless(self.model, data, rows, batch, &fails)?;
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
