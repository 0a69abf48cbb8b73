//! Gradient clipping by global norm.

use candle_core::backprop::GradStore;
use training::{clip_grad_norm, grad_norm};

use crate::{Ddp, Result};

impl<M> Ddp<M> {
    /// Returns the 2-norm of all gradients, the same on every rank; of the result of [`Ddp::backward`],
    /// [`Ddp::backward_weighted`] or [`Ddp::join`].
    ///
    /// # Cost
    /// One pass over the gradients; no communication.
    ///
    /// # Errors
    /// candle's; the first cause, if an earlier call failed.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        self.comm()?;
        Ok(grad_norm(grads, &self.vars())?)
    }

    /// Scales the gradients so that their global norm is at most `max_norm`, and returns the norm before scaling. Must be
    /// called on every rank, with the result of [`Ddp::backward`], [`Ddp::backward_weighted`] or [`Ddp::join`].
    ///
    /// Like PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True`: all gradients are multiplied by `max_norm / (norm +
    /// 1e-6)` if that is below 1. Every rank has the same gradients, and so computes the same norm.
    ///
    /// # Cost
    /// One pass over the gradients, and another one if they are scaled; no communication.
    ///
    /// # Errors
    /// [`training::Error::NotFinite`] if a gradient contains a NaN or an infinity; [`training::Error::InvalidConfig`] for a
    /// `max_norm` that is negative or NaN. The gradients are then unchanged. The first cause, if an earlier call failed.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
    /// # use comm::{Local, LocalConfig};
    /// # use ddp::{Ddp, DdpConfig};
    /// # let comm = Arc::new(Local::group(1, &LocalConfig::default())?.remove(0));
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear_no_bias(2, 1, vb))?;
    /// let mut grads = ddp.backward(&ddp.forward(&Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?)?.sum_all()?)?;
    /// assert_eq!(ddp.clip_grad_norm(&mut grads, 1.0)?, 5.0);
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        self.comm()?;
        Ok(clip_grad_norm(grads, &self.vars(), max_norm)?)
    }
}
