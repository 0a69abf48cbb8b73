//! Precision of matrix products (autocast).

use std::cell::RefCell;

use candle_core::{DType, Result, Tensor};

use crate::scoped::scoped;

/// Precision of products of f32 matrices on a CPU. Sums are always in f32, and so is everything else: norms, softmax,
/// losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Precision {
    /// Products in f32.
    #[default]
    F32,
    /// Each f32 product as three of bf16 if the processor has a matrix unit for them (relative error about 2^-16),
    /// otherwise in f32. As PyTorch's `set_float32_matmul_precision("high")`. An infinite operand may yield NaN.
    F32High,
    /// Operands are rounded to bf16 (relative error 2^-9) on every machine: PyTorch's `autocast`, except that results
    /// stay f32.
    Bf16,
}

thread_local! {
    static CURRENT: RefCell<Precision> = const { RefCell::new(Precision::F32) };
}

impl Precision {
    /// This thread's precision, set by the innermost [`autocast`].
    pub fn current() -> Self {
        CURRENT.with_borrow(|precision| *precision)
    }
}

/// Runs `f` on this thread with products of this [`Precision`] in [`Linear`](crate::Linear),
/// [`attention`](crate::attention), [`linear_cross_entropy`](crate::linear_cross_entropy) and the layers of tensor
/// parallelism. Backward of what `f` computes uses the same precision, also later or on another thread. Parameters,
/// and the outputs of layers, stay f32.
///
/// Tensors of other dtypes or on other devices are not affected: on a CPU bf16 is always multiplied as with
/// [`Precision::Bf16`], and f16 as with [`Precision::F32High`], which keep all digits of such numbers; sums are in f32.
///
/// # Cost
/// With [`Precision::Bf16`] a product ([`Precision::products`]) takes about an eighth of the f32 time with AMX, half
/// of the f32 time with AVX-512 on AMD's processors, and about a quarter more than the f32 time without either.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use training::{Linear, Precision, autocast};
///
/// let layer = Linear::new(Tensor::new(&[[1f32]], &Device::Cpu)?, None);
/// let x = Tensor::new(&[[1.001f32]], &Device::Cpu)?;
/// let y = autocast(Precision::Bf16, || layer.forward(&x))?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.0]]); // bf16 has 8 binary digits
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn autocast<R>(precision: Precision, f: impl FnOnce() -> R) -> R {
    scoped(&CURRENT, precision, f)
}

impl Precision {
    /// The product of matrices on a device other than a CPU, without a graph; each may be the transpose of a contiguous one.
    /// CUDA devices compute f32 in bf16 where the precision is that.
    pub(crate) fn product(self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let narrow = |x: &Tensor| match x.is_contiguous() {
            true => x.to_dtype(DType::BF16),
            false => x.t()?.to_dtype(DType::BF16)?.t(),
        };
        match self == Self::Bf16 && a.device().is_cuda() && a.dtype() == DType::F32 {
            true => narrow(a)?.matmul(&narrow(b)?)?.to_dtype(DType::F32),
            false => a.matmul(b),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_counts_and_ends() {
        assert_eq!(Precision::current(), Precision::F32);
        autocast(Precision::Bf16, || {
            autocast(Precision::F32, || assert_eq!(Precision::current(), Precision::F32));
            let ends = std::panic::catch_unwind(|| {
                autocast(Precision::F32High, || std::panic::resume_unwind(Box::new(())))
            });
            assert!(ends.is_err());
            assert_eq!(Precision::current(), Precision::Bf16);
        });
        assert_eq!(Precision::current(), Precision::F32);
    }
}
