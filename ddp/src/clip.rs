//! Clipping by the norm of all gradients together.

use candle_core::backprop::GradStore;
use training::clip_grad_norm;

use crate::{Ddp, Result};

impl<M> Ddp<M> {
    /// Scales the gradients so that their norm together is at most `max_norm`; gives the norm that they had. To be called on
    /// every rank, with what [`Ddp::backward`] or one of the others gave.
    ///
    /// As PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True`: all are multiplied with `max_norm / (norm + 1e-6)`
    /// where that is below 1. Every rank has the same gradients, so that all have the same norm.
    ///
    /// # Cost
    /// One pass over the gradients, and another one where they are clipped; no communication.
    ///
    /// # Errors
    /// [`training::Error::NotFinite`] where a gradient holds a NaN or an infinity; [`training::Error::InvalidConfig`] for a
    /// `max_norm` that is negative or NaN. Nothing is changed then.
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
        Ok(clip_grad_norm(grads, &self.vars(), max_norm)?)
    }
}
