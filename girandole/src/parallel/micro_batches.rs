//! Micro-batches: how a batch is divided, and the mean over the targets of all of them.

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation, ReduceOp, all_gather_object};
use ops::tape::scalar_with_gradient;
use ops::{Balance, DividedRows, Documents, PairResult, Preferences, RowContext, RowKeys, wide_dtype};
use training::build::Model;

use super::{Kind, Parallel};
use crate::agreement::all_agree;
use crate::{Batch, Error, Result};

/// A rank's share of a batch.
pub(crate) struct Prepared {
    pub(crate) batch: Batch,
    pub(crate) parts: Vec<MicroBatch>,
    /// Number of its first rows that count.
    counted: usize,
    /// Number of targets that count, of all ranks.
    pub(crate) total: usize,
    /// Factor of the sum of a micro-batch's losses with which the mean over ranks of the sums over micro-batches is the mean
    /// over all targets.
    pub(crate) loss_factor: f64,
}

/// What is found without backward: the mean loss over all targets of all ranks, and of this rank the model's sums and the results of
/// pairs.
pub(crate) struct Evaluated {
    pub(crate) loss: f64,
    pub(crate) sums: Vec<f64>,
    pub(crate) pairs: Vec<PairResult>,
}

/// A micro-batch, and how many of its targets count.
pub(crate) struct MicroBatch {
    input: Tensor,
    targets: Tensor,
    count: usize,
    /// This rank's share of them: 1, unless other ranks count the same.
    weight: f64,
    /// Of all its rows, also of those that do not count.
    pub(crate) rows: RowContext,
}

impl<M: Model> Parallel<M> {
    /// Returns what is found of the targets of all ranks, without backward; `in_training` with the random numbers of rows.
    pub(super) fn mean_loss(&mut self, prepared: &Prepared, in_training: bool) -> Result<Evaluated> {
        let Prepared { batch, parts, total, .. } = prepared;
        let contexts: Vec<RowContext> = parts
            .iter()
            .map(|part| match in_training {
                true => part.rows_once_more(),
                false => part.rows_in_evaluation(),
            })
            .collect();
        let asked = Documents::asked();
        let of = |model: &M| {
            let of_part = |(sum, sums), (part, rows): (&MicroBatch, &RowContext)| {
                let (loss, own) = part.evaluated(rows, model)?;
                Ok::<_, Error>((sum + part.add(&loss)?, added(sums, own)))
            };
            parts.iter().zip(&contexts).try_fold((0.0, Vec::new()), of_part)
        };
        let (sum, sums) = match &mut self.model {
            Kind::Stages(stages) => stages.evaluate(batch, contexts.clone(), prepared.counted)?,
            Kind::Whole { model, .. } => of(model)?,
            Kind::Copies(ddp) => of(ddp.model()?)?,
            Kind::Sharded(fsdp) => of(fsdp.model()?)?,
        };
        self.check_documents(batch, asked)?;
        let loss = self.sum_of_all(sum)? / *total as f64;
        let pairs =
            contexts.iter().filter_map(|rows| rows.preferences.as_ref()).flat_map(Preferences::results);
        let pairs = pairs.collect();
        let balances: Vec<Balance> = contexts.into_iter().filter_map(|rows| rows.balance).collect();
        let loss = if balances.is_empty() { loss } else { loss + self.balance_loss(&balances)? };
        Ok(Evaluated { loss, sums, pairs })
    }

    /// Checks once that some attention has asked for the documents of a batch, since `asked` on this rank, in one of the stages.
    pub(crate) fn check_documents(&mut self, batch: &Batch, asked: u64) -> Result<()> {
        if self.knows_documents || batch.documents.is_none() {
            return Ok(());
        }
        if sum(&**self.axes.mesh.axis("pp")?, (Documents::asked() - asked) as f64)? == 0.0 {
            let help = "the documents of a row would see each other: use ops::attention or ops::SelfAttention, or ask \
                        Documents::current() and mask";
            return Err(Error::invalid(
                "the model's attention",
                "none that asks for the documents of a batch",
                help,
            ));
        }
        self.knows_documents = true;
        Ok(())
    }

    /// Remembers the first failure, except for an error that leaves everything unchanged on all ranks.
    pub(crate) fn note<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && !matches!(error, Error::NoTargets)
        {
            self.failed = Some(error.to_string());
        }
        result
    }

    /// Divides a rank's share of a batch, and counts the targets of all ranks. Rows after the first `counted` do not count.
    pub(crate) fn prepare(&mut self, batch: Result<Batch>, counted: usize) -> Result<Prepared> {
        let prepared = batch.and_then(|batch| {
            let (batch, rows) = self.axes.part_of(batch)?;
            let parts = self.micro_batches(&batch, &rows, counted)?;
            Ok(Prepared { batch, parts, counted, total: 0, loss_factor: 0.0 })
        });
        let own = match &prepared {
            Ok(prepared) => {
                let [targets, cross_entropies] = counts_of(&prepared.parts);
                // Ranks that divide rows by position have the same ones.
                let ranks = self.axes.context.as_ref().map_or(1, |context| context.comm().world_size());
                [targets, cross_entropies, prepared.batch.input.dim(0)? as f64 / ranks as f64]
            }
            // Signals the failure to the other ranks.
            Err(_) => [f64::NAN; 3],
        };
        let averaged = &*self.axes.averaged;
        let [total, cross_entropies, rows] = sums(averaged, own)?;
        if total.is_nan() {
            return all_agree(averaged, prepared);
        }
        // Shares of several ranks may be rounded.
        let [total, cross_entropies, rows] = [total, cross_entropies, rows].map(f64::round);
        if total == 0.0 {
            return Err(Error::NoTargets);
        }
        let (loss_factor, mut prepared) = (averaged.world_size() as f64 / total, prepared?);
        for part in &mut prepared.parts {
            let weight = (cross_entropies > 0.0).then(|| total / cross_entropies);
            part.rows.preferences = part.rows.preferences.take().map(|pairs| pairs.renewed(weight));
            part.rows.balance = self.balance_of(rows);
        }
        self.take_example(&prepared.batch.input)?;
        Ok(Prepared { total: total as usize, loss_factor, ..prepared })
    }

    /// Makes the first batch the example of a pipeline that was given none.
    fn take_example(&mut self, input: &Tensor) -> Result<()> {
        if let (Kind::Stages(stages), None) = (&mut self.model, &self.config.example) {
            let rows = input.dim(0)? / self.config.micro_batches;
            let example = input.narrow(0, 0, rows)?.zeros_like()?;
            stages.prepare(&example)?;
            self.config.example = Some(example);
        }
        Ok(())
    }

    /// Divides a rank's rows into micro-batches. Of one with rows that do not count, only the others are left; if none is
    /// left, all stay, without targets that count.
    fn micro_batches(&self, batch: &Batch, of_all: &RowContext, counted: usize) -> Result<Vec<MicroBatch>> {
        let Batch { input, targets, documents, preferences } = batch;
        let count = self.config.micro_batches;
        let rows = input.dims().first().copied().unwrap_or(0);
        let is_divided = rows.is_multiple_of(count) || !matches!(self.model, Kind::Stages(_));
        if rows < count || !is_divided {
            let help = match &self.model {
                Kind::Stages(_) => {
                    format!("give each rank {count}, or a multiple of that: it has {count} micro-batches")
                }
                _ => format!("give each rank {count} or more: it has {count} micro-batches"),
            };
            return Err(Error::invalid("the rows of a batch", rows, help));
        }
        if targets.dims().first() != Some(&rows) {
            let help = format!("the input has {rows} rows: give as many");
            return Err(Error::invalid("the targets of a batch", format!("{:?}", targets.dims()), help));
        }
        if let Some(documents) = documents.as_ref().filter(|documents| documents.rows() != rows) {
            let (got, help) = (documents.rows(), format!("the input has {rows} rows: give as many"));
            return Err(Error::invalid("the documents of a batch", format!("those of {got} rows"), help));
        }
        if let Some(pairs) = preferences.as_ref().filter(|pairs| documents.is_none() || pairs.rows() != rows)
        {
            let got = match documents {
                None => "those of rows without documents".to_string(),
                Some(_) => format!("those of {} rows", pairs.rows()),
            };
            let help = format!("the input has {rows} rows: give as many, and two documents for each pair");
            return Err(Error::invalid("the pairs of a batch", got, help));
        }
        let (size, (rank, ranks)) = (rows / count, self.share_of_batch());
        let example = self.config.example.as_ref().and_then(|example| example.dims().first().copied());
        if let (Kind::Stages(_), Some(expected)) = (&self.model, example.filter(|expected| *expected != size))
        {
            let help = format!("stages have room for {expected} rows of each of {count} micro-batches");
            return Err(Error::invalid("the rows of a batch", rows, help));
        }
        let part = |place: usize| {
            // As equal as possible.
            let (begin, whole) = (place * rows / count, (place + 1) * rows / count);
            let is_counted = begin < counted;
            let end = if is_counted { whole.min(counted) } else { whole };
            let of = |all: &Tensor| match end - begin == rows {
                true => Ok(all.clone()),
                false => all.narrow(0, begin, end - begin)?.contiguous(),
            };
            let targets = of(targets)?;
            // Indices in the batch, whose rows are assigned to the ranks in turn.
            let places = (begin..whole).map(|row| row * ranks + rank);
            let keys = Some(RowKeys::new(self.config.seed, self.steps, places));
            let context = RowContext { keys, ..of_all.part(begin..whole) };
            let (count, weight) = count_of::<M>(&context, &targets)?;
            let count = if is_counted { count } else { 0 };
            Ok(MicroBatch { input: of(input)?, count, weight, targets, rows: context })
        };
        (0..count).map(part).collect()
    }

    /// Returns the number of parameters of the whole model, trained or not. Call on every rank.
    pub(crate) fn parameter_count(&self) -> Result<usize> {
        Ok(sum(&**self.axes.mesh.axis("pp")?, self.shards.elements() as f64)? as usize)
    }

    /// Adds up the sums of all ranks, of which some may have none.
    pub(super) fn sums_of_all(&self, own: Vec<f64>) -> Result<Vec<f64>> {
        let mut all = own;
        for comm in [&self.axes.averaged, self.axes.mesh.axis("pp")?] {
            let gathered: Vec<Vec<f64>> = match comm.world_size() {
                1 => vec![all],
                _ => all_gather_object(&**comm, &all)?,
            };
            all = gathered.into_iter().fold(Vec::new(), added);
        }
        Ok(all)
    }

    /// Sums the losses of all ranks; with a pipeline, those of its last stages.
    pub(crate) fn sum_of_all(&self, own: f64) -> Result<f64> {
        Ok(self.numbers_of_all([own])?[0])
    }

    /// Sums numbers of all ranks, as [`sum_of_all`](Self::sum_of_all).
    pub(super) fn numbers_of_all<const N: usize>(&self, own: [f64; N]) -> Result<[f64; N]> {
        sums(&**self.axes.mesh.axis("pp")?, sums(&*self.axes.averaged, own)?)
    }
}

impl MicroBatch {
    /// As in training, for another forward pass.
    fn rows_once_more(&self) -> RowContext {
        let balance = self.rows.balance.as_ref().map(Balance::renewed);
        RowContext { balance, preferences: self.pairs_once_more(), ..self.rows.clone() }
    }

    /// Without random numbers, and without balance of experts.
    fn rows_in_evaluation(&self) -> RowContext {
        RowContext { keys: None, balance: None, preferences: self.pairs_once_more(), ..self.rows.clone() }
    }

    fn pairs_once_more(&self) -> Option<Preferences> {
        self.rows.preferences.as_ref().map(|pairs| pairs.renewed(None))
    }

    /// Computes the loss in training, where rows have random numbers.
    pub(crate) fn training_loss<M: Model>(&self, model: &M) -> Result<Tensor> {
        self.loss(&self.rows, model)
    }

    fn loss<M: Model>(&self, rows: &RowContext, model: &M) -> Result<Tensor> {
        self.forward(rows, |input, targets| Ok((model.loss(input, targets)?, ())), model)
            .map(|(loss, _)| loss)
    }

    /// Computes the loss without backward, and the sums of an evaluation.
    fn evaluated<M: Model>(&self, rows: &RowContext, model: &M) -> Result<(Tensor, Vec<f64>)> {
        let (loss, sums) = self.forward(rows, |input, targets| model.evaluate(input, targets), model)?;
        Ok((loss.detach(), sums))
    }

    /// Runs a forward pass of these rows; without targets that count, one whose loss is 0.
    fn forward<M: Model, S: Default>(
        &self,
        rows: &RowContext,
        of_targets: impl FnOnce(&Tensor, &Tensor) -> candle_core::Result<(Tensor, S)>,
        model: &M,
    ) -> Result<(Tensor, S)> {
        let loss = rows.part(0..self.input.dim(0)?).scope(|| match self.count > 0 {
            true => Ok(of_targets(&self.input, &self.targets)?),
            false => Ok((zero_loss(&model.without_loss(&self.input)?)?, S::default())),
        });
        rows.balance.as_ref().map_or(Ok(()), Balance::end_forward)?;
        loss
    }

    /// Returns its contribution to the sum of all losses.
    pub(crate) fn add(&self, loss: &Tensor) -> Result<f64> {
        Ok(number(loss)? * self.count as f64 * self.weight)
    }

    pub(crate) fn weighted(&self, loss: &Tensor, loss_factor: f64) -> Result<Tensor> {
        weighted(loss, self.count.max(1), loss_factor * self.weight)
    }
}

/// Returns the number of a micro-batch's targets that count, and this rank's share of them. Of pairs, all ranks that divide the rows
/// count the same.
pub(super) fn count_of<M: Model>(rows: &RowContext, targets: &Tensor) -> candle_core::Result<(usize, f64)> {
    let of_rows = targets.dims().first().copied().unwrap_or(0);
    match &rows.preferences {
        None if of_rows == 0 => Ok((0, 1.0)),
        None => Ok((M::count(targets)?, 1.0)),
        Some(pairs) => {
            let ranks = rows.divided.as_ref().map_or(1, DividedRows::ranks);
            Ok((pairs.pairs(of_rows), 1.0 / ranks as f64))
        }
    }
}

/// Returns this rank's share of the targets that count, and of the cross-entropies of pairs.
fn counts_of(parts: &[MicroBatch]) -> [f64; 2] {
    let mut sums = [0.0; 2];
    for part in parts {
        let rows = part.rows.part(0..part.targets.dims().first().copied().unwrap_or(0));
        let of_pairs = rows.preferences.zip(rows.documents).filter(|_| part.count > 0);
        let cross_entropies = of_pairs.map_or(0, |(pairs, documents)| pairs.cross_entropies(&documents));
        sums[0] += part.count as f64 * part.weight;
        sums[1] += cross_entropies as f64 * part.weight;
    }
    sums
}

/// Scales a mean over `count` targets to its contribution to the mean over all targets.
pub(super) fn weighted(loss: &Tensor, count: usize, loss_factor: f64) -> Result<Tensor> {
    let factor = count as f64 * loss_factor;
    if factor == 1.0 {
        return Ok(loss.clone());
    }
    // The factor may not be representable in 16 bits.
    let wide = loss.to_dtype(wide_dtype(loss.dtype()))?;
    Ok(ops::tape::scale(&wide, factor)?)
}

/// Returns a loss with zero gradients, for a micro-batch without targets that count, whose mean would be NaN. Backward
/// still passes through all units, as on the ranks that share the parameters. (A product with 0 would not do: candle's
/// backward stops there.)
pub(super) fn zero_loss(output: &Tensor) -> Result<Tensor> {
    Ok(scalar_with_gradient(output, output.zeros_like()?)?)
}

/// Adds sums, of which one side may have none.
pub(crate) fn added(mut sums: Vec<f64>, own: Vec<f64>) -> Vec<f64> {
    sums.resize(sums.len().max(own.len()), 0.0);
    sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
    sums
}

pub(super) fn number(loss: &Tensor) -> Result<f64> {
    if loss.elem_count() != 1 {
        let help = "it must be one number, the mean over the targets that count";
        return Err(Error::invalid("the loss of a model", format!("shape {:?}", loss.dims()), help));
    }
    Ok(loss.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.get(0)?.to_scalar()?)
}

/// Returns the sum over the ranks of a group.
pub(crate) fn sum(comm: &dyn Communicator, own: f64) -> Result<f64> {
    Ok(sums(comm, [own])?[0])
}

fn sums<const N: usize>(comm: &dyn Communicator, mut numbers: [f64; N]) -> Result<[f64; N]> {
    if comm.world_size() > 1 {
        let tensor = Tensor::new(&numbers, &Device::Cpu)?;
        comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
        numbers.copy_from_slice(&tensor.to_vec1::<f64>()?);
    }
    Ok(numbers)
}
