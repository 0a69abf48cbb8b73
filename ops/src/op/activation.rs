//! Activation functions without a gate, as in GPT-2's feed-forward layers.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, bail};

use super::cast::cast;
use super::gated::{Gate, gelu, gelu_tanh, silu};
use super::working_dtype;
use crate::blocks::{map, map_pairs};
use crate::dense::{dense, with_numbers};
use crate::real::Real;
use crate::{cuda, tape};

impl Gate {
    /// Applies the activation alone: PyTorch's `silu`, `gelu` or `gelu(approximate="tanh")` (`gelu_new`).
    ///
    /// # Shapes
    /// Any; the result has the same shape.
    ///
    /// # Cost
    /// On a CPU one pass forward and one backward, in parallel; only the input is kept. The bits do not depend on the
    /// number of threads.
    ///
    /// # Errors
    /// A tensor that is not of f16, bf16, f32 or f64.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use ops::Gate;
    ///
    /// let y = Gate::GeluTanh.activate(&Tensor::new(&[1f64], &Device::Cpu)?)?.to_vec1::<f64>()?;
    /// assert!((y[0] - 0.841192).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn activate(self, x: &Tensor) -> candle_core::Result<Tensor> {
        if cuda::knows(x) {
            let x = x.contiguous()?;
            let y = cuda::activation(self.kind(), &x.detach())?;
            return tape::explicit_op1(self.function(), [&x], y, move |[x], gradient| {
                let gradient = gradient.detach().contiguous()?;
                Ok([Some(cuda::activation_backward(self.kind(), &x.detach(), &gradient)?)])
            });
        }
        let wide = cast(x, working_dtype(self.function(), x.dtype())?)?;
        let y = match (x.device().is_cpu(), self) {
            (true, _) => tape::apply_op1(&wide.contiguous()?, Activation(self))?,
            (false, Self::Silu) => wide.silu()?,
            (false, Self::Gelu) => wide.gelu_erf()?,
            (false, Self::GeluTanh) => wide.gelu()?,
        };
        cast(&y, x.dtype())
    }
}

impl Gate {
    /// The activation's own name.
    fn function(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
        }
    }
}

struct Activation(Gate);

/// A closure that is always inlined although it is passed as an argument: see `gated`.
macro_rules! inlined {
    ($function:ident) => {
        #[inline(always)]
        |x: T| $function(x)
    };
}

impl Activation {
    fn forward<T: Real>(&self, x: &[T]) -> Vec<T> {
        match self.0 {
            Gate::Silu => forward(x, inlined!(silu)),
            Gate::Gelu => forward(x, inlined!(gelu)),
            Gate::GeluTanh => forward(x, inlined!(gelu_tanh)),
        }
    }

    fn backward<T: Real>(&self, x: &[T], gradient: &[T]) -> Vec<T> {
        match self.0 {
            Gate::Silu => backward(x, gradient, inlined!(silu)),
            Gate::Gelu => backward(x, gradient, inlined!(gelu)),
            Gate::GeluTanh => backward(x, gradient, inlined!(gelu_tanh)),
        }
    }

    fn gradient<T: Real>(&self, x: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let found = with_numbers(x, |x| with_numbers(gradient, |g| Ok(self.backward::<T>(x, g))))?;
        Tensor::from_vec(found, x.shape(), x.device())
    }
}

#[inline(always)]
fn forward<T: Real>(x: &[T], activation: impl Fn(T) -> (T, T) + Sync) -> Vec<T> {
    map(
        x,
        #[inline(always)]
        |x| activation(x).0,
    )
}

#[inline(always)]
fn backward<T: Real>(x: &[T], gradient: &[T], activation: impl Fn(T) -> (T, T) + Sync) -> Vec<T> {
    map_pairs(
        x,
        gradient,
        #[inline(always)]
        |x, g| g * activation(x).1,
    )
}

impl CustomOp1 for Activation {
    fn name(&self) -> &'static str {
        self.0.function()
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let out = match storage {
            CpuStorage::F32(_) => CpuStorage::F32(self.forward(dense(storage, layout)?)),
            CpuStorage::F64(_) => CpuStorage::F64(self.forward(dense(storage, layout)?)),
            _ => bail!("{}: neither f32 nor f64", self.name()),
        };
        Ok((out, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        match x.dtype() {
            DType::F32 => self.gradient::<f32>(x, &gradient),
            _ => self.gradient::<f64>(x, &gradient),
        }
        .map(Some)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// A gate with ones as the second factor equals its activation.
    #[test]
    fn activations_are_those_of_gates() -> candle_core::Result<()> {
        for gate in [Gate::Silu, Gate::Gelu, Gate::GeluTanh] {
            let x = Var::from_tensor(&Tensor::randn(0f64, 3., (3, 700), &Device::Cpu)?)?;
            let outer = Tensor::randn(0f64, 1., (3, 700), &Device::Cpu)?;
            let both = [gate.activate(&x)?, gate.apply(&x, &x.ones_like()?)?];
            assert_agree(both, |y| (y * &outer)?.sum_all(), &[&x], 1e-14, gate.operation())?;
            let half = x.to_dtype(DType::BF16)?;
            assert_eq!(gate.activate(&half)?.dtype(), DType::BF16);
            assert!(gate.activate(&x.to_dtype(DType::U32)?).is_err());
        }
        Ok(())
    }
}
