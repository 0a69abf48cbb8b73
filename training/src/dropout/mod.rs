//! Dropout with masks from a seed.

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, bail};
use candle_nn::ModuleT;
use sampler::SharedGenerator;

use crate::op::dense;
use crate::{Error, Result, drawn};

/// In training zeroes each number with probability `p` and multiplies the others by `1 / (1 - p)`; in evaluation does nothing.
///
/// The masks come from the generator, so a run is the same from run to run. Ranks that each make it from a seed of their own
/// (say, the seed plus the rank) drop different numbers. Each forward in training draws one `next_u64` as the key of its
/// mask, whatever the tensor's size; a mask is never stored, backward makes it anew from the key. The same
/// generator gives the same masks on every device; they are not PyTorch's. What is computed again ([`recompute`](crate::recompute)) has
/// the mask that it had.
///
/// To go on from a checkpoint in the middle of a run, give the generator a seed made of the run's seed, the rank and the epoch at
/// each epoch's start ([`Generator::manual_seed`](sampler::Generator::manual_seed)).
///
/// # Cost
/// On a CPU one pass forward and one backward for f32 and f64; elsewhere the mask is made on the host and sent to the device.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::ModuleT;
/// use sampler::{Generator, SharedGenerator};
/// use training::Dropout;
///
/// let (seed, rank) = (42, 1);
/// let generator = SharedGenerator::from(Generator::new(seed + rank));
/// let dropout = Dropout::new(0.5, generator.clone())?; // other layers share the rank's generator
/// let x = Tensor::ones(1000, DType::F32, &Device::Cpu)?;
/// let kept = dropout.forward_t(&x, true)?.sum_all()?.to_scalar::<f32>()? / 2.0;
/// assert!((400.0..600.0).contains(&kept));
/// assert_eq!(dropout.forward_t(&x, false)?.to_vec1::<f32>()?, x.to_vec1::<f32>()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Dropout {
    p: f64,
    generator: SharedGenerator,
}

impl Dropout {
    /// Dropout with probability `p`, 0 to 1. It takes a generator for itself or one that it shares with other layers.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for another `p`.
    pub fn new(p: f64, generator: impl Into<SharedGenerator>) -> Result<Self> {
        if !(0.0..=1.0).contains(&p) {
            let help = "it must be a number from 0 to 1";
            return Err(Error::InvalidConfig { of: "Dropout", field: "p", got: p, help });
        }
        Ok(Self { p, generator: generator.into() })
    }

    /// The probability.
    pub fn p(&self) -> f64 {
        self.p
    }

    /// Draws the key of one forward in training; no mask where nothing is dropped.
    pub(crate) fn mask(&self) -> Option<Mask> {
        let draw = || self.generator.with(|generator| generator.next_u64());
        (self.p > 0.0).then(|| Mask::new(self.p, drawn(draw)))
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let Some(mask) = train.then(|| self.mask()).flatten() else { return Ok(x.clone()) };
        if x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::F64) {
            return tape::apply_op1(&x.contiguous()?, mask);
        }
        let factors: Vec<f32> = (0..x.elem_count() as u64).map(|index| mask.factor(index) as f32).collect();
        x * Tensor::from_vec(factors, x.shape(), &Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())?
    }
}

/// Which numbers of a tensor stay, made from a key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mask {
    key: u64,
    /// A number stays whose 32 random bits are not below.
    threshold: u64,
    scale: f64,
}

impl Mask {
    fn new(p: f64, key: u64) -> Self {
        let threshold = (p * (1u64 << 32) as f64).round() as u64;
        Self { key, threshold, scale: if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 } }
    }

    /// What the number at `index` is multiplied with.
    ///
    /// Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014), the mixing function.
    #[inline(always)]
    pub(crate) fn factor(&self, index: u64) -> f64 {
        let mut z = self.key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (z ^ (z >> 31)) >> 32 >= self.threshold { self.scale } else { 0.0 }
    }
}

impl CustomOp1 for Mask {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let out = match storage {
            CpuStorage::F32(_) => {
                let numbers = dense::<f32>(storage, layout)?.iter().zip(0..);
                CpuStorage::F32(numbers.map(|(x, index)| x * self.factor(index) as f32).collect())
            }
            CpuStorage::F64(_) => {
                let numbers = dense::<f64>(storage, layout)?.iter().zip(0..);
                CpuStorage::F64(numbers.map(|(x, index)| x * self.factor(index)).collect())
            }
            _ => bail!("dropout: neither f32 nor f64"),
        };
        Ok((out, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        gradient.contiguous()?.apply_op1_no_bwd(self).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Var;
    use sampler::Generator;

    use super::*;

    fn masks(p: f64, seed: u64, dtype: DType) -> candle_core::Result<Vec<f64>> {
        let dropout = Dropout::new(p, Generator::new(seed))?;
        let x = Tensor::ones((100, 200), dtype, &Device::Cpu)?;
        dropout.forward_t(&x, true)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
    }

    #[test]
    fn keeps_the_share_and_the_mean() -> candle_core::Result<()> {
        for p in [0.1, 0.5, 0.9] {
            let y = masks(p, 7, DType::F64)?;
            let kept = y.iter().filter(|&&x| x != 0.0).count() as f64 / y.len() as f64;
            // Five standard deviations.
            assert!((kept - (1.0 - p)).abs() < 5.0 * (p * (1.0 - p) / y.len() as f64).sqrt(), "{p}: {kept}");
            assert!(y.iter().all(|&x| x == 0.0 || x == 1.0 / (1.0 - p)));
        }
        assert!(masks(1.0, 7, DType::F64)?.iter().all(|&x| x == 0.0));
        Ok(())
    }

    #[test]
    fn masks_differ_by_seed_and_call_and_repeat() -> candle_core::Result<()> {
        assert_eq!(masks(0.5, 3, DType::F32)?, masks(0.5, 3, DType::F32)?);
        assert_eq!(masks(0.5, 3, DType::F32)?, masks(0.5, 3, DType::BF16)?);
        assert_ne!(masks(0.5, 3, DType::F32)?, masks(0.5, 4, DType::F32)?);
        let dropout = Dropout::new(0.5, Generator::new(3))?;
        let x = Tensor::ones(64, DType::F32, &Device::Cpu)?;
        let twice = [dropout.forward_t(&x, true)?, dropout.forward_t(&x, true)?];
        assert_ne!(twice[0].to_vec1::<f32>()?, twice[1].to_vec1::<f32>()?);
        Ok(())
    }

    #[test]
    fn the_gradient_wears_the_same_mask() -> candle_core::Result<()> {
        let dropout = Dropout::new(0.3, Generator::new(1))?;
        for dtype in [DType::F32, DType::F64, DType::F16] {
            let x = Var::from_tensor(&Tensor::ones((5, 7), dtype, &Device::Cpu)?)?;
            let y = dropout.forward_t(&x.t()?, true)?;
            let gradient =
                y.sum_all()?.backward()?.get(&x).unwrap().to_dtype(DType::F64)?.to_vec2::<f64>()?;
            assert_eq!(gradient, y.t()?.to_dtype(DType::F64)?.to_vec2::<f64>()?);
        }
        Ok(())
    }

    #[test]
    fn evaluation_draws_nothing() -> candle_core::Result<()> {
        let generator = SharedGenerator::from(Generator::new(1));
        let x = Tensor::ones(4, DType::F32, &Device::Cpu)?;
        Dropout::new(0.3, generator.clone())?.forward_t(&x, false)?;
        Dropout::new(0.0, generator.clone())?.forward_t(&x, true)?;
        assert_eq!(generator.with(|g| g.clone()), Generator::new(1));
        Ok(())
    }

    #[test]
    fn other_probabilities_are_refused() {
        for p in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let message = Dropout::new(p, Generator::new(0)).unwrap_err().to_string();
            assert!(message.starts_with("Dropout: p is "), "{message}");
        }
    }
}
