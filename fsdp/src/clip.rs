//! Clipping by the norm of all shards' gradients together.

use std::sync::Arc;

use candle_core::Var;
use candle_core::backprop::GradStore;
use comm::{Communicator, first_of, global_norm};
use training::{ScaledModel, clip_by_norm, first_not_finite, grad_norm};

use crate::{Error, Fsdp, Result};

/// What is counted in the norm of all gradients beside this model's, and what is not.
#[derive(Default)]
pub(crate) struct Norm {
    /// Of ranks that have other parts of a larger model.
    others: Vec<Arc<dyn Communicator>>,
    /// This rank's shards that are counted; none where all of them are.
    counted: Option<Vec<Var>>,
}

impl<M> Fsdp<M> {
    /// Says that this model is one part of a larger one, the others of which the ranks along `others` have: the groups along axes of
    /// a mesh other than this model's, such as those of pipeline stages and of tensor parallelism, in the same order on every rank.
    /// From now on [`grad_norm`](Self::grad_norm), [`clip_grad_norm`](Self::clip_grad_norm) and
    /// [`LossScaler::unscale`](crate::LossScaler::unscale) are of all parts together, and to be called on all these ranks.
    ///
    /// Of a parameter that several of these ranks have whole (a norm between divided layers, tied embeddings), `counts` must be
    /// true on one of them; all others are counted on each rank.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
    /// # use comm::{Communicator, Local, Mesh};
    /// # use fsdp::{Fsdp, FsdpConfig};
    /// # use candle_core::Tensor;
    /// let norms = Local::run_shared(4, |comm| {
    ///     let mesh = Mesh::new(comm, &[("pp", 2), ("shard", 2), ("replicate", 1)])?;
    ///     # let ones = Tensor::ones((1, 2), DType::F32, &Device::Cpu)?;
    ///     # let tensors = [("weight".to_string(), ones)];
    ///     # let vb = VarBuilder::from_tensors(tensors.into(), DType::F32, &Device::Cpu);
    ///     let mut fsdp = Fsdp::hybrid(&mesh, ("shard", "replicate"), vb, &FsdpConfig::default(), |units| {
    ///         units.unit(|vb| linear_no_bias(2, 1, vb))
    ///     })?;
    ///     fsdp.set_norm_over(vec![mesh.axis("pp")?.clone()], |_| true);
    ///     let x = Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?;
    ///     let mut grads = fsdp.backward(&fsdp.forward(&x)?.sum_all()?)?;
    ///     Ok(fsdp.clip_grad_norm(&mut grads, 1.0)?)
    /// })?;
    /// assert!(norms.iter().all(|norm| (norm - 50f64.sqrt()).abs() < 1e-6)); // of both stages
    /// # Ok::<(), fsdp::Error>(())
    /// ```
    pub fn set_norm_over(&mut self, others: Vec<Arc<dyn Communicator>>, counts: impl Fn(&str) -> bool) {
        let counted = self.core().params().filter(|param| counts(&param.name));
        let counted = Some(counted.map(|param| param.shard.clone()).collect());
        self.norm = Norm { others, counted };
    }

    /// The 2-norm of the gradients of all parameters together, on all ranks: the same bits on each. To be called on every rank.
    ///
    /// # Cost
    /// One pass over this rank's gradients, and an all-gather of 8 bytes of each rank that has another shard.
    ///
    /// # Errors
    /// candle's; failures of communication.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        self.core().check()?;
        let own = match &self.norm.counted {
            None => grad_norm(grads, &self.vars())?,
            Some(counted) => grad_norm(grads, counted)?,
        };
        Ok(global_norm(self.parts(), own)?)
    }

    /// Scales the gradients so that their norm together is at most `max_norm`; gives the norm that they had. To be called on
    /// every rank, with what [`Fsdp::backward`] gave.
    ///
    /// As PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True`: all are multiplied with `max_norm / (norm + 1e-6)`
    /// where that is below 1. The norm is this model's; where it is a part of a larger one, see
    /// [`set_norm_over`](Self::set_norm_over).
    ///
    /// # Cost
    /// That of [`Fsdp::grad_norm`], and another pass where they are clipped.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] where a gradient holds a NaN or an infinity on any rank;
    /// [`training::Error::InvalidConfig`] for a `max_norm` that is negative or NaN. Nothing is changed then.
    pub fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        let norm = self.grad_norm(grads)?;
        if !norm.is_finite() {
            return Err(Error::NotFinite { unit: self.first_not_finite(grads)?, norm });
        }
        clip_by_norm(grads, &self.vars(), norm, max_norm)?;
        Ok(norm)
    }

    /// The ranks that have other parts.
    fn parts(&self) -> impl Iterator<Item = &dyn Communicator> {
        self.core().groups.shard.iter().chain(&self.norm.others).map(|group| &**group)
    }

    /// A unit with a gradient that holds a NaN or an infinity on some rank: the same on each.
    fn first_not_finite(&self, grads: &GradStore) -> Result<String> {
        let unit = |place| self.core().unit_of(place).map(|unit| format!("unit {}", unit.name));
        let own = first_not_finite(grads, &self.vars())?.and_then(unit);
        // None where only the sum of all squares is too large.
        Ok(first_of(self.parts(), own)?.map_or("all units together".into(), |(_, unit)| unit))
    }
}

impl<M> ScaledModel for Fsdp<M> {
    type Error = Error;

    fn scaled_vars(&self) -> Vec<Var> {
        self.vars()
    }

    fn norm(&self, grads: &GradStore) -> Result<f64> {
        self.grad_norm(grads)
    }
}
