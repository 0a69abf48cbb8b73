//! Gradient clipping by the global norm over all shards.

use std::sync::Arc;

use candle_core::Var;
use candle_core::backprop::GradStore;
use comm::{Communicator, first_of, global_norm};
use training::internal::{clip_by_norm, first_not_finite};
use training::{ScaledModel, grad_norm};

use crate::model::Norm;
use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Makes the norm that of a larger model of which this one is a part. `others` are the groups whose ranks hold the other
    /// parts: those along mesh axes other than this model's, such as pipeline stages and tensor parallelism, in the same
    /// order on every rank. From then on [`grad_norm`](Self::grad_norm), [`clip_grad_norm`](Self::clip_grad_norm) and
    /// [`LossScaler::unscale`](crate::LossScaler::unscale) cover all parts, and must be called on all these ranks.
    ///
    /// For a parameter that several of these ranks hold whole (a norm layer between divided layers, tied embeddings),
    /// `counts` must return true on exactly one of them. All other parameters are counted on every rank.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
    /// # use comm::{Communicator, Local, Mesh};
    /// # use fsdp::{Fsdp, FsdpConfig};
    /// # use candle_core::Tensor;
    /// let norms = Local::run_shared(4, |comm| {
    ///     let mesh = Mesh::new(comm, &[("pp", 2), ("shard", 2), ("dp", 1)])?;
    ///     # let ones = Tensor::ones((1, 2), DType::F32, &Device::Cpu)?;
    ///     # let tensors = [("weight".to_string(), ones)];
    ///     # let vb = VarBuilder::from_tensors(tensors.into(), DType::F32, &Device::Cpu);
    ///     let mut fsdp = Fsdp::hybrid(&mesh, ("shard", "dp"), vb, &FsdpConfig::default(), |units| {
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

    /// Returns the 2-norm of the gradients of all parameters over all ranks, bitwise the same on each. Must be called on
    /// every rank.
    ///
    /// # Cost
    /// One pass over this rank's gradients, and an all-gather of 8 bytes per rank within the shard group and within each
    /// group of [`set_norm_over`](Self::set_norm_over).
    ///
    /// # Errors
    /// Errors of candle; the first cause, if an earlier call failed; failures of communication.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        self.core().check()?;
        let own = match &self.norm.counted {
            None => grad_norm(grads, &self.vars())?,
            Some(counted) => grad_norm(grads, counted)?,
        };
        Ok(global_norm(self.parts(), own)?)
    }

    /// Scales the gradients so that their global norm is at most `max_norm`, and returns the norm before scaling. Must be
    /// called on every rank, with the result of [`Fsdp::backward`].
    ///
    /// Like PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True`: all gradients are multiplied by `max_norm / (norm +
    /// 1e-6)` if that is below 1. The norm is this model's; for a part of a larger model, see
    /// [`set_norm_over`](Self::set_norm_over).
    ///
    /// # Cost
    /// That of [`Fsdp::grad_norm`], and another pass if they are scaled.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] if a gradient contains a NaN or an infinity on any rank;
    /// [`training::Error::InvalidConfig`] for a `max_norm` that is negative or NaN. The gradients are then unchanged.
    pub fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        let norm = self.grad_norm(grads)?;
        if !norm.is_finite() {
            let own = first_not_finite(grads, &self.vars())?;
            let own = own.and_then(|place| self.core().params().nth(place)).map(|param| param.name.clone());
            if let Some((rank, parameter)) = first_of(self.parts(), own)? {
                return Err(Error::NotFinite { parameter, rank, norm });
            }
        }
        clip_by_norm(grads, &self.vars(), norm, max_norm)?;
        Ok(norm)
    }

    /// Returns the groups over which the norm is summed.
    fn parts(&self) -> impl Iterator<Item = &dyn Communicator> {
        self.core().groups.shard.iter().chain(&self.norm.others).map(|group| &**group)
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
