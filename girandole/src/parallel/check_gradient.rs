//! Checks the gradients of a step, in every layout.

use candle_core::{DType, Device, Tensor, Var};
use comm::{Operation, ReduceOp, all_gather_object};
use ops::Precision;
use strategy::DistributedModel;
use training::build::Model;
use training::internal::{CheckedLoss, CheckedPart, check_gradient_of};
use training::{GradientCheck, GradientCheckConfig};

use super::micro_batches::Prepared;
use super::{Kind, Parallel, Step};
use crate::{Batch, Error, Result};

/// Names and shapes of parameters.
type Shapes = Vec<(String, Vec<usize>)>;

impl<M: Model> Parallel<M> {
    /// Checks the gradients of the last [`step`](Self::step) by forward passes with changed parameters, before the optimizer
    /// changes any ([`training::check_gradient`]): what an operation without backward has lost is found in every layout, with
    /// the parameters' names. Call on every rank, with the batch of the step. Parameters and running statistics are afterwards
    /// as before, to the bit. Products are in f32; parameters of 16 bits cannot be checked, and are undecided. Rounding
    /// may have made gradients of a step with products in 16 bits ([`autocast`](ops::autocast)) zero: give those of
    /// [`step_in_f32`](Self::step_in_f32).
    ///
    /// # Cost
    /// At most [`GradientCheckConfig::forward_passes`] evaluations of the batch, and some more to find the place of what is
    /// wrong; for each parameter an all-reduce of as many numbers as it has rows.
    ///
    /// # Errors
    /// [`training::Error::LostGradients`], on every rank, with [`OnMissingGradient::Fail`](training::OnMissingGradient);
    /// [`training::Error::NotRepeatable`]; those of [`evaluate`](Self::evaluate).
    pub fn check_gradient(
        &mut self,
        batch: &Batch,
        step: &Step,
        config: &GradientCheckConfig,
    ) -> Result<GradientCheck> {
        self.check()?;
        let check = Precision::F32.scope(|| self.try_check_gradient(batch, step, config));
        self.note(check)
    }

    fn try_check_gradient(
        &mut self,
        batch: &Batch,
        step: &Step,
        config: &GradientCheckConfig,
    ) -> Result<GradientCheck> {
        let (parameters, parts) = self.checked_parts(step, config)?;
        // The random numbers of rows are those of the step.
        let next = self.steps;
        self.steps = next.saturating_sub(1);
        let batch = self.prepare(Ok(batch.clone()), usize::MAX);
        self.steps = next;
        let mut loss = InLayout { parallel: self, batch: batch? };
        let check = check_gradient_of(&mut loss, &parameters, parts, config)?;
        if let Kind::Stages(stages) = &self.model {
            stages.gather()?;
        }
        config.act(self.axes.mesh.world().rank() == 0, check.clone())?;
        Ok(check)
    }

    /// Returns all parameters that are trained, with their shapes, in one order on all ranks, and what this rank has of them.
    fn checked_parts(&self, step: &Step, config: &GradientCheckConfig) -> Result<(Shapes, Vec<CheckedPart>)> {
        let vars = self.named_vars();
        let is_checked = |name: &str, var: &Var| {
            let is_trained = vars.iter().any(|(_, trained)| trained.id() == var.id());
            is_trained && var.dtype().is_float() && !config.is_frozen(name)
        };
        let mut pieces = self.pieces()?;
        pieces.retain(|piece| is_checked(&piece.name, &piece.var));
        let own: Vec<_> =
            pieces.iter().map(|piece| (piece.name.clone(), piece.region.dims.clone())).collect();
        // Only stages, and ranks with different experts, have different parameters.
        let mut all: Shapes = own;
        for axis in ["pp", "ep"] {
            all = all_gather_object(&**self.axes.mesh.axis(axis)?, &all)?.into_iter().flatten().collect();
        }
        all.sort();
        all.dedup_by(|(one, _), (other, _)| one == other);
        let parts = pieces.into_iter().filter_map(|piece| {
            let parameter = all.iter().position(|(name, _)| *name == piece.name)?;
            let (gradient, counts) =
                (step.grads.get(&piece.var).cloned(), self.counted.contains(&piece.var.id()));
            let elements = piece.region.elements().collect();
            Some(CheckedPart { parameter, var: piece.var, gradient, elements, counts })
        });
        let parts = parts.collect();
        Ok((all, parts))
    }
}

/// The mean loss over all targets of all ranks, in training.
struct InLayout<'a, M> {
    parallel: &'a mut Parallel<M>,
    batch: Prepared,
}

impl<M: Model> CheckedLoss for InLayout<'_, M> {
    type Error = Error;

    fn loss(&mut self) -> Result<f64> {
        Ok(self.parallel.mean_loss(&self.batch, true)?.loss)
    }

    fn sum(&mut self, numbers: &mut [f64]) -> Result<()> {
        let groups = self.parallel.partition_groups();
        for group in groups.into_iter().filter(|group| group.world_size() > 1) {
            let sum = Tensor::new(&*numbers, &Device::Cpu)?;
            group.run(Operation::AllReduce { tensor: sum.clone(), op: ReduceOp::Sum })?;
            numbers.copy_from_slice(&sum.to_vec1::<f64>()?);
        }
        Ok(())
    }

    fn rounding(&self) -> f64 {
        match self.parallel.config.dtype {
            DType::F64 => f64::EPSILON,
            _ => f64::from(f32::EPSILON),
        }
    }

    fn state(&self) -> Vec<Var> {
        self.parallel.buffers().into_iter().map(|(_, var)| var).collect()
    }
}
