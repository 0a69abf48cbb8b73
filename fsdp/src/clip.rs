//! Clipping by the norm of all shards' gradients together.

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use comm::{Operation, ReduceOp};
use training::{grad_norm, scale_grads};

use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// The 2-norm of the gradients of all parameters together, on all ranks: the same number on each. To be called on every rank.
    ///
    /// # Cost
    /// One pass over this rank's gradients, and an all-reduce of 8 bytes.
    ///
    /// # Errors
    /// candle's; failures of communication.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        self.core().check()?;
        let own = grad_norm(grads, &self.vars())?;
        let Some(comm) = &self.core().groups.shard else { return Ok(own) };
        let total = Tensor::new(&[own * own], &Device::Cpu)?;
        comm.run(Operation::AllReduce { tensor: total.clone(), op: ReduceOp::Sum })?;
        Ok(total.to_vec1::<f64>()?[0].sqrt())
    }

    /// Scales the gradients so that their norm together is at most `max_norm`; gives the norm that they had. To be called on
    /// every rank, with what [`Fsdp::backward`] gave.
    ///
    /// As PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True`: all are multiplied with `max_norm / (norm + 1e-6)`
    /// where that is below 1.
    ///
    /// # Cost
    /// That of [`Fsdp::grad_norm`], and another pass where they are clipped.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] where a gradient holds a NaN or an infinity on any rank;
    /// [`training::Error::InvalidConfig`] for a `max_norm` that is negative or NaN. Nothing is changed then.
    pub fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        // What PyTorch adds, so that gradients of zero can be divided by.
        const TINY: f64 = 1e-6;
        if max_norm.is_nan() || max_norm < 0.0 {
            let help = "it must be a number, 0 or more";
            let (of, field) = ("clip_grad_norm", "max_norm");
            return Err(training::Error::InvalidConfig { of, field, got: max_norm, help }.into());
        }
        let norm = self.grad_norm(grads)?;
        if !norm.is_finite() {
            return Err(Error::NotFinite { unit: self.first_not_finite(grads)?, norm });
        }
        let factor = max_norm / (norm + TINY);
        if factor < 1.0 {
            scale_grads(grads, &self.vars(), factor)?;
        }
        Ok(norm)
    }

    /// The first unit with a gradient that holds a NaN or an infinity on any rank: the same on each.
    fn first_not_finite(&self, grads: &GradStore) -> Result<String> {
        let vars = self.vars();
        let odd = |var| grad_norm(grads, std::slice::from_ref(var)).map_or(true, |norm| !norm.is_finite());
        // Where this rank has none, another one has.
        let own = vars.iter().position(odd).unwrap_or(vars.len());
        let first = Tensor::new(&[own as i64], &Device::Cpu)?;
        if let Some(comm) = &self.core().groups.shard {
            comm.run(Operation::AllReduce { tensor: first.clone(), op: ReduceOp::Min })?;
        }
        let first = usize::try_from(first.to_vec1::<i64>()?[0]).ok();
        let unit = first.and_then(|place| self.core().unit_of(place));
        // None where only the sum of all squares is too large.
        Ok(unit.map_or("all units together".into(), |unit| format!("unit {}", unit.name)))
    }
}
