//! Forward and backward of a batch, in every layout.

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation, ReduceOp};
use training::GradSums;
use training::build::Model;

use super::{Kind, Parallel, Step};
use crate::{Error, Result};

/// A micro-batch, and how many of its targets count.
struct MicroBatch {
    input: Tensor,
    targets: Tensor,
    count: usize,
}

impl<M: Model> Parallel<M> {
    /// One step on this rank's rows: forward, backward, and everything that ranks exchange. Ranks that differ in `pp` or `tp` alone are
    /// given the same rows; those along `dp` and `shard` have others, as many each.
    ///
    /// The loss is the mean over all targets that count, of all ranks and micro-batches together, whatever their numbers on each.
    ///
    /// # Shapes
    /// Both begin with the dimension of rows, which [`ParallelConfig::micro_batches`](super::ParallelConfig) divides.
    ///
    /// # Cost
    /// That of the strategies; the number of targets and the loss are summed over the ranks, 8 bytes each.
    ///
    /// # Errors
    /// Rows that the micro-batches do not divide; no target that counts on any rank; what the model and the strategy fail with.
    pub fn step(&mut self, input: &Tensor, targets: &Tensor) -> Result<Step> {
        let parts = self.micro_batches(input, targets)?;
        let (total, share) = self.share(&parts)?;
        let (sum, mut grads) = match &mut self.model {
            Kind::Stages(stages) => stages.step((input, targets), share, &self.shards)?,
            Kind::Whole { model, vars } => {
                let mut sums = GradSums::new(vars.all_vars());
                let (mut sum, mut only) = (0.0, None);
                let is_one = parts.len() == 1;
                for part in &parts {
                    let loss = part.loss(model)?;
                    sum += part.add(&loss)?;
                    let mut grads = part.weighted(&loss, share)?.backward()?;
                    match is_one {
                        true => only = Some(grads),
                        false => sums.take(&mut grads)?,
                    }
                }
                (sum, only.map_or_else(|| sums.finish(), Ok)?)
            }
            Kind::Copies(ddp) => {
                let (mut sum, mut grads) = (0.0, None);
                for (place, part) in parts.iter().enumerate() {
                    let loss = part.loss(ddp.model()?)?;
                    sum += part.add(&loss)?;
                    let weighted = part.weighted(&loss, share)?;
                    match place + 1 == parts.len() {
                        true => grads = Some(ddp.backward(&weighted)?),
                        false => ddp.backward_no_sync(&weighted)?,
                    }
                }
                (sum, grads.ok_or_else(nothing)?)
            }
            Kind::Sharded(fsdp) => {
                let (mut sum, mut grads) = (0.0, None);
                for (place, part) in parts.iter().enumerate() {
                    let loss = part.loss(fsdp.model()?)?;
                    sum += part.add(&loss)?;
                    let weighted = part.weighted(&loss, share)?;
                    match place + 1 == parts.len() {
                        true => grads = Some(fsdp.backward(&weighted)?),
                        false => fsdp.backward_no_sync(&weighted)?,
                    }
                }
                (sum, grads.ok_or_else(nothing)?)
            }
        };
        // Stages have done so before they take their parts.
        if !matches!(self.model, Kind::Stages(_)) {
            self.shards.sum_gradients(&self.all_vars(), &mut grads)?;
        }
        Ok(Step { loss: self.sum_of_all(sum)? / total as f64, targets: total, grads })
    }

    /// The mean loss of a batch, forward alone. To be called on every rank, with rows as for [`step`](Self::step).
    ///
    /// # Errors
    /// Those of [`step`](Self::step).
    pub fn evaluate(&mut self, input: &Tensor, targets: &Tensor) -> Result<f64> {
        let parts = self.micro_batches(input, targets)?;
        let (total, _) = self.share(&parts)?;
        let of = |model: &M| {
            parts
                .iter()
                .try_fold(0.0, |sum, part| Ok::<_, Error>(sum + part.add(&part.loss(model)?.detach())?))
        };
        let sum = match &mut self.model {
            Kind::Stages(stages) => stages.evaluate(input, targets)?,
            Kind::Whole { model, .. } => of(model)?,
            Kind::Copies(ddp) => of(ddp.model()?)?,
            Kind::Sharded(fsdp) => of(fsdp.model()?)?,
        };
        Ok(self.sum_of_all(sum)? / total as f64)
    }

    /// A rank's rows in equal parts.
    fn micro_batches(&self, input: &Tensor, targets: &Tensor) -> Result<Vec<MicroBatch>> {
        let count = self.config.micro_batches;
        let rows = input.dims().first().copied().unwrap_or(0);
        if rows == 0 || !rows.is_multiple_of(count) {
            let help = format!("give each rank a multiple of its {count} micro-batches");
            return Err(Error::invalid("the rows of a batch", rows, help));
        }
        if targets.dims().first() != Some(&rows) {
            let help = format!("the input has {rows} rows: give as many");
            return Err(Error::invalid("the targets of a batch", format!("{:?}", targets.dims()), help));
        }
        let size = rows / count;
        let part = |place: usize| {
            let of = |all: &Tensor| match count {
                1 => Ok(all.clone()),
                _ => all.narrow(0, place * size, size)?.contiguous(),
            };
            let targets = of(targets)?;
            Ok(MicroBatch { input: of(input)?, count: M::count(&targets)?, targets })
        };
        (0..count).map(part).collect()
    }

    /// The number of targets of all ranks, and what the sum of a micro-batch's losses is multiplied with, so that the mean over ranks of
    /// the sums over micro-batches is the mean over all targets.
    fn share(&self, parts: &[MicroBatch]) -> Result<(usize, f64)> {
        let own: usize = parts.iter().map(|part| part.count).sum();
        let total = sum(&*self.data, own as f64)?;
        if total == 0.0 {
            let help = "at least one target of a step must count";
            return Err(Error::invalid("the targets of a batch", "none that counts on any rank", help));
        }
        Ok((total as usize, self.data.world_size() as f64 / total))
    }

    /// The sum over ranks of the sums of their losses, of which a pipeline's last stage has each.
    fn sum_of_all(&self, own: f64) -> Result<f64> {
        let own = sum(&*self.data, own)?;
        sum(&**self.mesh.axis("pp")?, own)
    }
}

impl MicroBatch {
    fn loss<M: Model>(&self, model: &M) -> Result<Tensor> {
        if self.count > 0 {
            return Ok(model.loss(&self.input, &self.targets)?);
        }
        let output = model.units().into_iter().try_fold(self.input.clone(), |x, unit| unit.forward(&x))?;
        nothing_of(&output)
    }

    /// What it adds to the sum of all losses.
    fn add(&self, loss: &Tensor) -> Result<f64> {
        Ok(number(loss)? * self.count as f64)
    }

    fn weighted(&self, loss: &Tensor, share: f64) -> Result<Tensor> {
        weighted(loss, self.count.max(1), share)
    }
}

/// A mean over `count` targets, as a part of the mean over all.
pub(super) fn weighted(loss: &Tensor, count: usize, share: f64) -> Result<Tensor> {
    let factor = count as f64 * share;
    Ok(if factor == 1.0 { loss.clone() } else { (loss * factor)? })
}

/// The loss of a micro-batch of which no target counts, where a mean would be NaN: all gradients are zero, but ranks that share parameters
/// go through the same units.
pub(super) fn nothing_of(output: &Tensor) -> Result<Tensor> {
    Ok((output.sum_all()? * 0.0)?)
}

pub(super) fn number(loss: &Tensor) -> Result<f64> {
    Ok(loss.to_dtype(DType::F64)?.flatten_all()?.get(0)?.to_scalar()?)
}

/// The sum over the ranks of a group.
fn sum(comm: &dyn Communicator, own: f64) -> Result<f64> {
    if comm.world_size() == 1 {
        return Ok(own);
    }
    let tensor = Tensor::new(&[own], &Device::Cpu)?;
    comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
    Ok(tensor.to_vec1::<f64>()?[0])
}

fn nothing() -> Error {
    Error::invalid("micro_batches", 0, "give 1 or more")
}
