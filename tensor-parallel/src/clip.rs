//! What is said of all ranks' gradients together, and whether ranks still have the same where they should.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{first_of, global_norm, parameter_difference};
use training::{clip_by_norm, first_not_finite, grad_norm};

use crate::{Error, Result, Split, TensorParallel};

impl<M> TensorParallel<M> {
    /// The 2-norm of the gradients of all parameters together, on all ranks: the same bits on each. Parts of a parameter are
    /// counted on the ranks that have them, a parameter that every rank has whole is counted once. To be called on every rank, with
    /// what [`backward`](Self::backward) gave.
    ///
    /// It is the norm of this model. Where the mesh has other axes than `dp` and `tp`, such as the stages of a pipeline, there is another
    /// model for each place along them, whose norm does not count here.
    ///
    /// # Cost
    /// One pass over this rank's gradients, and an all-gather of 8 bytes of each tensor-parallel rank.
    ///
    /// # Errors
    /// candle's; failures of communication.
    pub fn grad_norm(&self, grads: &GradStore) -> Result<f64> {
        let is_first = self.context().rank() == 0;
        let counted = self.parameters().iter().filter(|p| is_first || p.split() != Split::Whole);
        let counted: Vec<Var> = counted.map(|parameter| parameter.var().clone()).collect();
        // The copies along dp have the same gradients.
        Ok(global_norm([&**self.context().comm()], grad_norm(grads, &counted)?)?)
    }

    /// Scales the gradients so that their norm together, on all ranks, is at most `max_norm`; gives the norm that they had. To be
    /// called on every rank, with what [`backward`](Self::backward) gave.
    ///
    /// As PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True` in one process that has all weights: all are multiplied with
    /// `max_norm / (norm + 1e-6)` where that is below 1.
    ///
    /// # Cost
    /// That of [`grad_norm`](Self::grad_norm), and another pass where they are clipped.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] where a gradient holds a NaN or an infinity on any rank;
    /// [`training::Error::InvalidConfig`] for a `max_norm` that is negative or NaN. Nothing is changed then.
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

    /// Compares, bit for bit, the parameters that every rank has whole over all ranks, and the parts of the others over the
    /// data-parallel ranks that have the same. To be called on every rank, at the same place: now and then in a long training, or
    /// while looking for a mistake.
    ///
    /// # Cost
    /// One pass over the parameters, and all-gathers of a few bytes. Only where they differ: 8 bytes for each parameter, then a
    /// broadcast of one parameter.
    ///
    /// # Errors
    /// [`Error::ParametersDiffer`], the same on every rank, names the first parameter that differs, the ranks, the element (in
    /// their part) and both values. Training can go on after it. Failures of communication.
    pub fn check_parameters(&self) -> Result<()> {
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
