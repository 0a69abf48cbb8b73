//! Global gradient norm, gradient clipping, and the check that replicated parameters are equal.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{first_of, global_norm, parameter_difference};
use training::grad_norm;
use training::internal::{clip_by_norm, first_not_finite};

use crate::{Error, Result, Split, TensorParallel};

impl<M> TensorParallel<M> {
    /// Returns the 2-norm of the gradients of all parameters over all ranks, bitwise the same on each. A divided parameter is
    /// counted on each rank that has a part of it, one that every rank holds whole is counted once. Must be called on every
    /// rank, with the result of [`backward`](Self::backward).
    ///
    /// The norm is this model's. If the mesh has axes other than `dp` and `tp`, such as the stages of a pipeline, there is a
    /// separate model for each position along them, whose norm is not included.
    ///
    /// # Cost
    /// One pass over this rank's gradients, and an all-gather of 8 bytes per tensor-parallel rank.
    ///
    /// # Errors
    /// Errors of candle; failures of communication.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        self.check()?;
        let is_first = self.context().rank() == 0;
        let counted = self.parameters().iter().filter(|p| is_first || p.split() != Split::Whole);
        let counted: Vec<Var> = counted.map(|parameter| parameter.var().clone()).collect();
        // The replicas along `dp` have the same gradients.
        Ok(global_norm([&**self.context().comm()], grad_norm(grads, &counted)?)?)
    }

    /// Scales the gradients so that their global norm is at most `max_norm`, and returns the norm before scaling. Must be
    /// called on every rank, with the result of [`backward`](Self::backward).
    ///
    /// Like PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True` in a single process that has all weights: all
    /// gradients are multiplied by `max_norm / (norm + 1e-6)` if that is below 1.
    ///
    /// # Cost
    /// That of [`grad_norm`](Self::grad_norm), and another pass if they are scaled.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] if a gradient contains a NaN or an infinity on any rank;
    /// [`training::Error::InvalidConfig`] for a `max_norm` that is negative or NaN. The gradients are then unchanged.
    pub fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        let norm = self.grad_norm(grads)?;
        if !norm.is_finite() {
            let own = first_not_finite(grads, &self.vars())?.map(|place| self.parameters()[place].name());
            if let Some((rank, parameter)) = first_of([self.world()], own.map(String::from))? {
                return Err(Error::NotFinite { parameter, rank, norm });
            }
        }
        clip_by_norm(grads, &self.vars(), norm, max_norm)?;
        Ok(norm)
    }

    /// Compares parameters bit for bit: those that every rank holds whole over all ranks, and parts of divided ones over the
    /// data-parallel replicas. Must be called on every rank, at the same point: occasionally during a long training, or when
    /// debugging.
    ///
    /// # Cost
    /// One pass over the parameters, and all-gathers of a few bytes. Only if they differ: 8 bytes per parameter, then a
    /// broadcast of one parameter.
    ///
    /// # Errors
    /// [`Error::ParametersDiffer`], the same on every rank, names the first parameter that differs, the ranks, the element
    /// (within their part) and both values. Training can continue after it. Failures of communication.
    pub fn check_parameters(&self) -> Result<()> {
        self.check()?;
        let of = |is_whole: bool| -> Vec<(&str, &Tensor)> {
            let same = self.parameters().iter().filter(|p| (p.split() == Split::Whole) == is_whole);
            same.map(|parameter| (parameter.name(), parameter.var().as_tensor())).collect()
        };
        let mut found = parameter_difference(self.world(), &of(true))?;
        if let (None, Some(dp)) = (&found, self.dp()) {
            let own = parameter_difference(&**dp, &of(false))?;
            found = first_of([self.world()], own)?.map(|(_, difference)| difference);
        }
        found.map_or(Ok(()), |difference| Err(Box::new(difference).into()))
    }
}
