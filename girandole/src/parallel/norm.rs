//! What is reported if the norm of all gradients is not finite.

use candle_core::Var;
use candle_core::backprop::GradStore;
use strategy::DistributedModel;
use training::ScaledModel;
use training::build::Model;

use super::Parallel;
use crate::{Error, Result};

impl<M: Model> Parallel<M> {
    /// Fails on every rank if the norm is not finite, and names a parameter. Call on every rank.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with this step; failures of communication.
    pub fn check_finite(&self, grads: &GradStore, norm: f64, step: u64) -> Result<()> {
        if norm.is_finite() {
            return Ok(());
        }
        let first = self.first_not_finite(grads)?;
        let parameter = first.map_or_else(|| "all parameters together".into(), |(_, name)| name);
        Err(Error::NotFinite { step, parameter, norm })
    }
}

impl<M: Model> ScaledModel for Parallel<M> {
    type Error = Error;

    fn scaled_vars(&self) -> Vec<Var> {
        self.named_vars().into_iter().map(|(_, var)| var).collect()
    }

    fn norm(&self, grads: &GradStore) -> Result<f64> {
        self.grad_norm(grads)
    }
}
