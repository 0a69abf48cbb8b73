//! Ranks with different numbers of steps.

use candle_core::backprop::GradStore;

use crate::{Ddp, Result};

impl<M> Ddp<M> {
    /// Takes part in a step of the ranks that still have data, and returns their averaged gradients, so that this rank's
    /// optimizer can keep its parameters equal to theirs. Returns `None` when no rank has data any more: then all ranks have
    /// called `join`, and training can continue together.
    ///
    /// The others call [`Ddp::backward_weighted`], as in every step. The average is over the ranks that have data: with
    /// numbers of samples as weights, the mean over all samples of the step; with a weight of 1, the mean over the remaining
    /// ranks (in PyTorch: `join(divide_by_initial_world_size=False)`. Its default divides by the number of all ranks, so that
    /// late samples count less; for that, multiply the loss by the fraction of remaining ranks). Gradients accumulated by
    /// [`Ddp::backward_weighted_no_sync`] are included in the first step.
    ///
    /// # Cost
    /// That of [`Ddp::backward_weighted`]; nothing extra for the ranks that have data. The last call: an all-reduce of 8
    /// bytes per rank.
    ///
    /// # Errors
    /// As [`Ddp::backward`]. If the others call [`Ddp::backward`], without a weight, every rank gets
    /// [`comm::Error::Mismatch`].
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
    /// # use comm::{Communicator, Local};
    /// # use ddp::{Ddp, DdpConfig};
    /// // Rank 0 has one batch, rank 1 has three.
    /// let trained = Local::run_shared(2, |comm| {
    ///     let batches = vec![Tensor::ones((4, 1), DType::F32, &Device::Cpu)?; 1 + 2 * comm.rank()];
    ///     # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    ///     let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(1, 1, vb))?;
    ///     let mut optimizer = SGD::new(ddp.vars(), 0.1)?;
    ///     for x in batches {
    ///         let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
    ///         optimizer.step(&ddp.backward_weighted(&loss, x.dim(0)? as f64)?)?;
    ///     }
    ///     while let Some(grads) = ddp.join()? {
    ///         optimizer.step(&grads)?;
    ///     }
    ///     Ok(ddp.vars()[1].to_vec1::<f32>()?)
    /// })?;
    /// assert_eq!(trained[0], trained[1]);
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn join(&self) -> Result<Option<GradStore>> {
        self.reducer.join()
    }
}
