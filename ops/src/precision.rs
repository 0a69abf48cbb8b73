//! Precision of matrix products (autocast).

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Result, Tensor};

use crate::scoped::scoped;
use crate::warning::warn;

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
    /// How often this thread has been asked for each precision, by operations that compute in it.
    static ASKED: Cell<[u64; 3]> = const { Cell::new([0; 3]) };
}

/// Whether an [`autocast`] without effect has been reported.
static REPORTED: AtomicBool = AtomicBool::new(false);

impl Precision {
    /// This thread's precision, set by the innermost [`autocast`]. Call it from operations that compute in it: a scope in which
    /// none asks has no effect, which is reported.
    pub fn current() -> Self {
        let precision = Self::of_scope();
        let mut asked = ASKED.get();
        asked[precision as usize] += 1;
        ASKED.set(asked);
        precision
    }

    /// This thread's precision, for what does not compute in it: unlike [`current`](Self::current) this is no effect of the scope.
    pub fn of_scope() -> Self {
        CURRENT.with_borrow(|precision| *precision)
    }

    /// As [`autocast`], where it is no mistake that nothing is computed in the scope: around a whole program, of which one
    /// process only starts others.
    pub fn scope<R>(self, f: impl FnOnce() -> R) -> R {
        scoped(&CURRENT, self, f)
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
/// candle's own operations (`Tensor::matmul`, `candle_nn::linear`, convolutions) always compute in f32. A scope in which nothing
/// was computed in its precision is reported, once per process.
///
/// # Cost
/// With [`Precision::Bf16`] a product ([`Precision::products`]) takes about an eighth of the f32 time with AMX, half
/// of the f32 time with AVX-512 on AMD's processors, and about a quarter more than the f32 time without either.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use ops::{Linear, Precision, autocast};
///
/// let layer = Linear::new(Tensor::new(&[[1f32]], &Device::Cpu)?, None);
/// let x = Tensor::new(&[[1.001f32]], &Device::Cpu)?;
/// let y = autocast(Precision::Bf16, || layer.forward(&x))?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.0]]); // bf16 has 8 binary digits
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn autocast<R>(precision: Precision, f: impl FnOnce() -> R) -> R {
    let (result, had_effect) = observed(precision, f);
    if !had_effect && !REPORTED.swap(true, Ordering::Relaxed) {
        warn(&format!(
            "autocast(Precision::{precision:?}) had no effect: nothing was computed in this precision between its beginning and its end. \
             candle's own layers and products, such as candle_nn::linear and Tensor::matmul, stay in f32: use ops::linear, \
             ops::attention and ops::linear_cross_entropy"
        ));
    }
    result
}

/// Returns also whether an operation was computed in this precision, or there is nothing to compute otherwise.
fn observed<R>(precision: Precision, f: impl FnOnce() -> R) -> (R, bool) {
    let before = ASKED.get()[precision as usize];
    let result = precision.scope(f);
    (result, precision == Precision::F32 || ASKED.get()[precision as usize] != before)
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
    use candle_core::{Device, Module};

    use super::*;

    /// candle's layers are always computed in f32, a scope around them has no effect; ours know it.
    #[test]
    fn a_scope_without_effect_is_noticed() -> Result<()> {
        let (x, weight) = (
            Tensor::ones((2, 3), DType::F32, &Device::Cpu)?,
            Tensor::ones((4, 3), DType::F32, &Device::Cpu)?,
        );
        let candles = candle_nn::Linear::new(weight.clone(), None);
        let ours = crate::Linear::new(weight, None);
        for precision in [Precision::Bf16, Precision::F32High] {
            assert!(!observed(precision, || candles.forward(&x)).1, "{precision:?}");
            assert!(observed(precision, || ours.forward(&x)).1, "{precision:?}");
            // An inner scope of another precision is no effect of the outer one, one of the same is.
            assert!(
                !observed(precision, || observed(Precision::F32, || ours.forward(&x))).1,
                "{precision:?}"
            );
            assert!(observed(precision, || observed(precision, || ours.forward(&x))).1, "{precision:?}");
        }
        assert!(observed(Precision::F32, || candles.forward(&x)).1);
        let (seen, had_effect) = observed(Precision::Bf16, Precision::of_scope);
        assert!(seen == Precision::Bf16 && !had_effect);
        Ok(())
    }

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
