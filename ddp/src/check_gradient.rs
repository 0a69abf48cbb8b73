//! Checks the gradients that all ranks average.

use candle_core::{DType, Device, Tensor, Var};
use comm::{Operation, ReduceOp};
use ops::Precision;
use training::internal::{CheckedLoss, CheckedPart, check_gradient_of};
use training::{GradientCheck, GradientCheckConfig};

use crate::{Ddp, Error, Result};

impl<M> Ddp<M> {
    /// Checks the averaged gradients of a loss by forward passes with changed parameters ([`training::check_gradient`]): finds
    /// what an operation without backward has lost, and names the parameters. Call on every rank, before the first step; each
    /// with a loss of its own rows, which must be the same in every pass. Parameters and buffers are afterwards as before, to the
    /// bit.
    ///
    /// # Cost
    /// One [`Ddp::backward`] and at most [`GradientCheckConfig::forward_passes`] forward passes, each with an all-reduce of 8
    /// bytes; some more to find the place of what is wrong.
    ///
    /// # Errors
    /// [`training::Error::LostGradients`], on every rank, with [`OnMissingGradient::Fail`](training::OnMissingGradient);
    /// [`training::Error::NotRepeatable`]; errors of forward; those of [`Ddp::backward`].
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear};
    /// # use comm::{Local, LocalConfig};
    /// # use ddp::{Ddp, DdpConfig};
    /// # let comm = Arc::new(Local::group(1, &LocalConfig::default())?.remove(0));
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(4, 4, vb))?;
    /// let x = Tensor::new(&[[1f32, 2.0, 0.5, -1.0], [0.3, -2.0, 1.5, 1.0]], &Device::Cpu)?;
    /// let loss = |model: &candle_nn::Linear| {
    ///     candle_nn::ops::softmax_last_dim(&model.forward(&x)?)?.sqr()?.mean_all()
    /// };
    /// let lost = ddp.check_gradient(loss, &Default::default()).unwrap_err();
    /// assert!(lost.to_string().contains("softmax_last_dim (use ops::softmax)"));
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn check_gradient(
        &self,
        loss: impl FnMut(&M) -> candle_core::Result<Tensor>,
        config: &GradientCheckConfig,
    ) -> Result<GradientCheck> {
        Precision::F32.scope(|| self.try_check_gradient(loss, config))
    }

    fn try_check_gradient(
        &self,
        mut loss: impl FnMut(&M) -> candle_core::Result<Tensor>,
        config: &GradientCheckConfig,
    ) -> Result<GradientCheck> {
        let first = loss(self.model()?).map_err(Error::during(FORWARD))?;
        let rounding = if first.dtype() == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let grads = self.backward(&first)?;
        drop(first);
        let vars: Vec<_> =
            self.named_vars().into_iter().filter(|(name, _)| !config.is_frozen(name)).collect();
        let wholes: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
        let part = |(parameter, (_, var)): (usize, (String, Var))| {
            let (gradient, elements) =
                (grads.get(&var).cloned(), std::iter::once(0..var.elem_count()).collect());
            CheckedPart { parameter, var, gradient, elements, counts: true }
        };
        let parts = vars.into_iter().enumerate().map(part).collect();
        let check = check_gradient_of(&mut OfCopies { ddp: self, loss, rounding }, &wholes, parts, config)?;
        config.act(self.comm()?.rank() == 0, check.clone())?;
        Ok(check)
    }
}

const FORWARD: &str = "a forward pass to check gradients";

/// The mean of the ranks' losses.
struct OfCopies<'a, M, F> {
    ddp: &'a Ddp<M>,
    loss: F,
    rounding: f64,
}

impl<M, F: FnMut(&M) -> candle_core::Result<Tensor>> CheckedLoss for OfCopies<'_, M, F> {
    type Error = Error;

    fn loss(&mut self) -> Result<f64> {
        let during = || Error::during(FORWARD);
        let loss = (self.loss)(self.ddp.model()?).map_err(during())?;
        let number = |loss: Tensor| loss.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.reshape(1);
        let mean = number(loss).map_err(during())?;
        self.ddp.comm()?.run(Operation::AllReduce { tensor: mean.clone(), op: ReduceOp::Avg })?;
        mean.get(0).and_then(|mean| mean.to_scalar()).map_err(during())
    }

    fn rounding(&self) -> f64 {
        self.rounding
    }

    fn state(&self) -> Vec<Var> {
        self.ddp.buffers().iter().map(|(_, var)| var.clone()).collect()
    }
}
