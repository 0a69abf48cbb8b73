//! Dropout with masks derived from a seed.

mod mask;

use candle_core::{Device, Tensor};
use candle_nn::ModuleT;
use sampler::{SharedGenerator, split_mix};

use crate::{Error, Result, RowContext, RowKeys, cuda, drawn, tape};

pub(crate) use mask::Mask;

/// In training zeroes each element with probability `p` and multiplies the others by `1 / (1 - p)`; in evaluation
/// does nothing.
///
/// A model that must drop the same elements in every layout derives its masks from the rows: [`by_row`](Self::by_row).
///
/// Otherwise masks come from the generator, so they are the same in every run. Ranks that seed it differently (for example,
/// with the seed plus the rank) drop different elements. Each forward in training draws one `next_u64` as the key of
/// its mask, whatever the tensor's size (none for an empty one, or a probability of 0); the mask is never stored, as backward computes it again from the key. The
/// same generator gives the same masks on every device; they are not PyTorch's. A part that is recomputed
/// ([`recompute`](crate::recompute)) gets the same mask again.
///
/// To resume from a checkpoint in the middle of a run, reseed the generator at the start of each epoch, with a seed
/// made of the run's seed, the rank and the epoch ([`Generator::manual_seed`](sampler::Generator::manual_seed)).
///
/// # Cost
/// On a CPU one pass forward and one backward; on other devices the mask is computed on the host and copied to the
/// device.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::ModuleT;
/// use sampler::{Generator, SharedGenerator};
/// use ops::Dropout;
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
    source: Source,
}

/// Source of mask keys.
#[derive(Debug, Clone)]
enum Source {
    Generator(SharedGenerator),
    Rows(RowSlice),
}

/// Which part of the whole rows this rank's layer has.
#[derive(Debug, Clone, Copy)]
struct RowSlice {
    /// Hash of the layer's name, unique in the model.
    layer: u64,
    /// Number of positions, or heads, before this rank's.
    before: usize,
    /// Number of features before this rank's, and the total, where features are divided.
    features: Option<(usize, usize)>,
}

impl Dropout {
    /// Creates dropout with probability `p`, 0 to 1, with a generator of its own or one shared with other layers.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a `p` outside 0 to 1.
    pub fn new(p: f64, generator: impl Into<SharedGenerator>) -> Result<Self> {
        Self::of(p, Source::Generator(generator.into()))
    }

    /// Creates dropout whose masks depend only on the row and the layer: the same elements of a row are dropped
    /// whichever rank has it, in whichever micro-batch, and however its layers are divided. It drops only inside
    /// [`RowKeys::scope`], which thus separates training from evaluation; `forward_t` with `train` false never drops.
    /// `layer` is the layer's name, which must be unique.
    ///
    /// # Errors
    /// Errors of [`new`](Self::new).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::ModuleT;
    /// use ops::{Dropout, RowKeys};
    ///
    /// let dropout = Dropout::by_row(0.5, "mlp")?;
    /// let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
    /// let both = RowKeys::new(42, 0, 0..4).scope(|| dropout.forward_t(&x, true))?;
    /// // A rank that has the last two of the rows.
    /// let own = RowKeys::new(42, 0, 2..4).scope(|| dropout.forward_t(&x.narrow(0, 2, 2)?, true))?;
    /// assert_eq!(own.to_vec2::<f32>()?, both.narrow(0, 2, 2)?.to_vec2::<f32>()?);
    /// assert_eq!(dropout.forward_t(&x, true)?.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn by_row(p: f64, layer: &str) -> Result<Self> {
        let layer = layer.bytes().fold(0, |all, byte| split_mix(all, 1 + u64::from(byte)));
        Self::of(p, Source::Rows(RowSlice { layer, before: 0, features: None }))
    }

    fn of(p: f64, source: Source) -> Result<Self> {
        if !(0.0..=1.0).contains(&p) {
            let help = "it must be a number from 0 to 1";
            return Err(Error::InvalidConfig { of: "Dropout", field: "p", got: p, help });
        }
        Ok(Self { p, source })
    }

    /// Sets, for masks [`by_row`](Self::by_row), how many positions of the sequence, or in
    /// [`attention`](crate::attention) how many heads, come before this rank's own, where it has a part of each row.
    #[must_use]
    pub fn after(mut self, before: usize) -> Self {
        if let Source::Rows(place) = &mut self.source {
            place.before = before;
        }
        self
    }

    /// Sets, for masks [`by_row`](Self::by_row), that this rank has some of the `all` features of each position, with
    /// `before` features before its own.
    #[must_use]
    pub fn among_features(mut self, before: usize, all: usize) -> Self {
        if let Source::Rows(place) = &mut self.source {
            place.features = Some((before, all));
        }
        self
    }

    /// The probability.
    pub fn p(&self) -> f64 {
        self.p
    }

    /// The mask of one forward in training on `rows` rows; `None` if nothing is dropped. `each` is the number of
    /// lines per position or head.
    pub(crate) fn mask(&self, rows: usize, each: usize) -> candle_core::Result<Option<Mask>> {
        if self.p == 0.0 {
            return Ok(None);
        }
        Ok(match &self.source {
            Source::Generator(generator) => {
                let draw = || generator.with(|generator| generator.next_u64());
                Some(Mask::of_all(self.p, drawn(draw)))
            }
            Source::Rows(place) => match RowKeys::current() {
                None => None,
                Some(keys) => {
                    let keys = keys.layer_keys(place.layer, rows)?;
                    Some(Mask::of_rows(self.p, keys, place.before * each, place.features))
                }
            },
        })
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        if !train || x.elem_count() == 0 {
            return Ok(x.clone());
        }
        let rows = x.dims().first().copied().unwrap_or(1);
        let Some(mut mask) = self.mask(rows, 1)? else { return Ok(x.clone()) };
        if let Some(divided) = RowContext::current().divided {
            mask = mask.of_places(&divided, x.dims())?;
        }
        if x.device().is_cpu() {
            return tape::apply_op1(&x.contiguous()?, mask);
        }
        if cuda::knows(x) && !mask.is_divided() {
            let (x, mask) = (x.contiguous()?, mask.on_device(x.dims(), x.device())?);
            let y = cuda::dropped(&x.detach(), &mask)?;
            return tape::explicit_op1("dropout", [&x], y, move |_, gradient| {
                Ok([Some(cuda::dropped(&gradient.detach().contiguous()?, &mask)?)])
            });
        }
        let factors = mask.factors(x.dims());
        x * Tensor::from_vec(factors, x.shape(), &Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())?
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};
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
            // Within five standard deviations.
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

    /// The mask of a part of a batch equals that part of the whole mask: some rows, positions or features.
    #[test]
    fn a_part_of_a_batch_has_its_part_of_the_mask() -> candle_core::Result<()> {
        let dropout = Dropout::by_row(0.5, "layer")?;
        let keys = RowKeys::new(7, 3, 0..4);
        let x = Tensor::ones((4, 6, 8), DType::F64, &Device::Cpu)?;
        let whole = keys.scope(|| dropout.forward_t(&x, true))?;
        let part = |rows: (usize, usize), positions: (usize, usize), features: (usize, usize)| {
            let x = x
                .narrow(0, rows.0, rows.1)?
                .narrow(1, positions.0, positions.1)?
                .narrow(2, features.0, features.1)?;
            let dropout = dropout.clone().after(positions.0).among_features(features.0, 8);
            let got = keys.part(rows.0..rows.0 + rows.1).scope(|| dropout.forward_t(&x, true))?;
            let expected = whole
                .narrow(0, rows.0, rows.1)?
                .narrow(1, positions.0, positions.1)?
                .narrow(2, features.0, features.1)?;
            assert_eq!(got.flatten_all()?.to_vec1::<f64>()?, expected.flatten_all()?.to_vec1::<f64>()?);
            candle_core::Result::Ok(())
        };
        part((0, 4), (0, 6), (0, 8))?;
        part((1, 2), (0, 6), (0, 8))?;
        part((0, 4), (3, 3), (0, 8))?;
        part((2, 2), (2, 3), (4, 4))?;
        // Rows that are not consecutive, as when ranks take rows in turn.
        let odd = RowKeys::new(7, 3, [1, 3]).scope(|| dropout.forward_t(&x.narrow(0, 0, 2)?, true))?;
        let rows = Tensor::new(&[1u32, 3], &Device::Cpu)?;
        let expected = whole.index_select(&rows, 0)?;
        assert_eq!(odd.flatten_all()?.to_vec1::<f64>()?, expected.flatten_all()?.to_vec1::<f64>()?);
        // Another layer, another step, another seed.
        let of = |name: &str, seed, step| {
            let dropout = Dropout::by_row(0.5, name)?;
            RowKeys::new(seed, step, 0..4)
                .scope(|| dropout.forward_t(&x, true))?
                .flatten_all()?
                .to_vec1::<f64>()
        };
        let all = [of("layer", 7, 3)?, of("layes", 7, 3)?, of("layer", 8, 3)?, of("layer", 7, 4)?];
        assert_eq!(all[0], whole.flatten_all()?.to_vec1::<f64>()?);
        assert!((0..4).all(|a| (0..a).all(|b| all[a] != all[b])));
        Ok(())
    }

    #[test]
    fn keys_are_of_as_many_rows() -> candle_core::Result<()> {
        let x = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
        let dropout = Dropout::by_row(0.5, "layer")?;
        let said = RowKeys::new(0, 0, 0..2).scope(|| dropout.forward_t(&x, true)).unwrap_err().to_string();
        assert!(said.starts_with("dropout of 3 rows within RowKeys of 2: "), "{said}");
        assert!(RowKeys::current().is_none());
        Ok(())
    }

    #[test]
    fn sixteen_bits_are_rounded_once() -> candle_core::Result<()> {
        let x = Tensor::full(3f32, 64, &Device::Cpu)?.to_dtype(DType::BF16)?;
        let y = Dropout::new(0.1, Generator::new(5))?.forward_t(&x, true)?.to_dtype(DType::F32)?;
        // 3 / 0.9 is 3.333, of which bf16 has 3.328; 1 / 0.9 in bf16 would make it 3.344.
        assert!(y.to_vec1::<f32>()?.into_iter().all(|y| y == 0.0 || y == 3.328125));
        Ok(())
    }
}
