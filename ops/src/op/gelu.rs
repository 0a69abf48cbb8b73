//! Exact GELU: x times the standard normal distribution function of x.

use candle_core::Tensor;

use super::gated::Gate;

/// `x Φ(x)`, where Φ is the distribution function of the standard normal distribution: PyTorch's `nn.GELU()`, in one
/// pass forward and one backward (the backward of candle's `gelu_erf` takes a dozen passes, with a constant of six
/// digits).
///
/// # Shapes
/// Any; the result has the same shape.
///
/// # Cost
/// That of [`Gate::activate`].
///
/// # Errors
/// A tensor that is not of f16, bf16, f32 or f64.
///
/// # Source
/// Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)" (2016).
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let y = ops::gelu(&Tensor::new(&[-1f64, 0., 1.], &Device::Cpu)?)?.to_vec1::<f64>()?;
/// assert!((y[2] - 0.8413447460685429).abs() < 1e-12 && (y[0] + 0.15865525393145707).abs() < 1e-12);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn gelu(x: &Tensor) -> candle_core::Result<Tensor> {
    Gate::Gelu.activate(x)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    #[test]
    fn f32_is_the_rounded_f64() -> candle_core::Result<()> {
        let numbers: Vec<f32> = (-80_000..80_000).map(|i| i as f32 * 1.25e-4).collect();
        let narrow = Var::from_vec(numbers, 160_000, &Device::Cpu)?;
        let wide = Var::from_tensor(&narrow.to_dtype(DType::F64)?)?;
        let (y, z) = (gelu(&wide)?, gelu(&narrow)?);
        let gap =
            |a: &Tensor, b: &Tensor| (a - b.to_dtype(DType::F64)?)?.abs()?.max_all()?.to_scalar::<f64>();
        let worst = gap(&y, &z)?;
        assert!(worst < 5e-7, "{worst}");
        let (y, z) = (y.backward()?, z.backward()?);
        let gap = gap(y.get(&wide).unwrap(), z.get(&narrow).unwrap())?;
        assert!(gap < 5e-7, "{gap}");
        Ok(())
    }

    /// Equal within the accuracy of candle's gradient, which has a constant of six digits.
    #[test]
    fn it_is_candles() -> candle_core::Result<()> {
        let x = Var::from_tensor(&Tensor::randn(0f64, 2., (3, 70), &Device::Cpu)?)?;
        let (ours, candles) = (gelu(&x.t()?)?, x.t()?.gelu_erf()?);
        assert!((&ours - &candles)?.abs()?.max_all()?.to_scalar::<f64>()? < 1e-12);
        let (ours, candles) = (ours.sum_all()?.backward()?, candles.sum_all()?.backward()?);
        let gap = (ours.get(&x).unwrap() - candles.get(&x).unwrap())?.abs()?.max_all()?;
        assert!(gap.to_scalar::<f64>()? < 1e-6);
        Ok(())
    }
}
