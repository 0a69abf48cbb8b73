//! The norm of a model that is a part of a larger one.

use std::sync::Arc;

use candle_core::Var;
use candle_core::backprop::GradStore;
use comm::Communicator;
use strategy::DistributedModel;
use training::ScaledModel;

use crate::model::Norm;
use crate::{Error, Fsdp, Result};

impl<M> Fsdp<M> {
    /// Makes the norm that of a larger model of which this one is a part. `others` are the groups whose ranks hold the other
    /// parts: those along mesh axes other than this model's, such as pipeline stages and tensor parallelism, in the same
    /// order on every rank. From then on [`grad_norm`](DistributedModel::grad_norm), [`clip_grad_norm`](DistributedModel::clip_grad_norm) and
    /// [`LossScaler::unscale`](crate::LossScaler::unscale) cover all parts, and must be called on all these ranks.
    ///
    /// For a parameter that several of these ranks hold whole (a norm layer between divided layers, tied embeddings),
    /// `counts` must return true on exactly one of them. All other parameters are counted on every rank.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
    /// # use comm::{Communicator, Local, Mesh};
    /// # use fsdp::{DistributedModel, Fsdp, FsdpConfig};
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
