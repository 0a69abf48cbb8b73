//! Rotary position embedding: rotates pairs of elements of queries and keys by an angle that grows with the position.

mod frequencies;

use std::iter::repeat_n;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, bail};

pub use frequencies::RotaryScaling;

use self::frequencies::frequencies;
use super::cast::cast;
use super::working_dtype;
use crate::blocks::{blocks, of_rows};
use crate::dense::{dense, with_numbers};
use crate::real::Real;
use crate::simd::vectorized;
use crate::{Error, Result, RowContext, cuda, tape};

const NAME: &str = "rotary";

/// Which elements of a head form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RotaryLayout {
    /// Element i of the first half and element i of the second: Hugging Face's Llama, candle's `rope`.
    #[default]
    HalfSplit,
    /// Elements 2 i and 2 i + 1: the original Llama's weights, candle's `rope_i`.
    Interleaved,
}

/// Configuration of a [`Rotary`] embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryConfig {
    /// Elements of a head, even.
    pub head_dim: usize,
    /// Number of positions in the table.
    pub max_len: usize,
    /// The base of the angles (`rope_theta`), above 1. Default in [`RotaryConfig::new`]: 10,000.
    pub theta: f64,
    /// Which elements form a pair. Default in [`RotaryConfig::new`]: halves.
    pub layout: RotaryLayout,
    /// Scaling for contexts longer than those in training. Default in [`RotaryConfig::new`]: none.
    pub scaling: RotaryScaling,
}

impl RotaryConfig {
    /// A configuration with pairs from both halves, a base of 10,000, and no scaling.
    pub fn new(head_dim: usize, max_len: usize) -> Self {
        Self {
            head_dim,
            max_len,
            theta: 10_000.0,
            layout: RotaryLayout::default(),
            scaling: RotaryScaling::default(),
        }
    }

    fn validate(&self) -> Result<()> {
        let invalid = |field, got, help| Err(Error::InvalidConfig { of: "RotaryConfig", field, got, help });
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return invalid(
                "head_dim",
                self.head_dim as f64,
                "it must be even and above 0: pairs are rotated",
            );
        }
        if self.max_len == 0 {
            return invalid("max_len", 0.0, "there must be a position at least");
        }
        if !(self.theta.is_finite() && self.theta > 1.0) {
            return invalid("theta", self.theta, "it must be a finite number above 1");
        }
        Ok(())
    }
}

/// Rotary position embedding, with a fused gradient (candle_nn's `rope`, `rope_i` and `rope_thd` have none).
///
/// The table of sines and cosines is f32, computed as Hugging Face's transformers computes it.
///
/// # Cost
/// `max_len * head_dim` f32 numbers, computed once; clones share them.
///
/// # Source
/// Su et al., "RoFormer" (2021), section 3.2; Chen et al., "Extending Context Window of Large Language Models via Positional
/// Interpolation" (2023); Peng et al., "YaRN" (2023), section 3.
///
/// ```
/// use candle_core::{Device, Var};
/// use ops::{Rotary, RotaryConfig, RotaryLayout, RotaryScaling};
///
/// let config = RotaryConfig { scaling: RotaryScaling::Linear { factor: 2.0 }, ..RotaryConfig::new(2, 16) };
/// let rotary = Rotary::new(&config, &Device::Cpu)?;
/// // One row of the batch, two positions, one head.
/// let q = Var::new(&[[[1f32, 0.], [1., 0.]]], &Device::Cpu)?;
/// let turned = rotary.apply(&q, 0)?;
/// assert_eq!(turned.to_vec3::<f32>()?[0], [[1.0, 0.0], [0.5f32.cos(), 0.5f32.sin()]]);
/// assert!(turned.sum_all()?.backward()?.get(&q).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Rotary {
    config: RotaryConfig,
    /// `(max_len, head_dim / 2)`.
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Computes the table, on the device of the tensors that will be rotated.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]: a `head_dim` that is odd, a factor that is not above 0; candle's, if memory is
    /// exhausted.
    pub fn new(config: &RotaryConfig, device: &Device) -> Result<Self> {
        config.validate()?;
        let (frequencies, factor) = frequencies(config.head_dim, config.theta, &config.scaling)?;
        let table = |f: fn(f64) -> f64| {
            let angles = (0..config.max_len).flat_map(|at| frequencies.iter().map(move |&x| at as f32 * x));
            let numbers: Vec<f32> = angles.map(|x| f(f64::from(x)) as f32 * factor as f32).collect();
            Tensor::from_vec(numbers, (config.max_len, frequencies.len()), device)
        };
        Ok(Self { cos: table(f64::cos)?, sin: table(f64::sin)?, config: config.clone() })
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &RotaryConfig {
        &self.config
    }

    /// Rotates queries or keys. The first is at position `offset`: with a cache, the number of positions in it. In a scope of
    /// [`Documents`](crate::Documents), `offset` is the first's place in its row, and positions are those in the documents; of
    /// [`DividedRows`](crate::DividedRows) it is the first's index among the places that this rank has.
    ///
    /// # Shapes
    /// `(.., positions, heads * head_dim)`, with any number of adjacent heads, as [`attention`](crate::attention)
    /// takes them; or `(batch, heads, positions, head_dim)`. The result has the same shape.
    ///
    /// # Cost
    /// On a CPU one pass forward and one backward, in parallel; nothing is kept. The bits do not depend on the number of threads.
    ///
    /// # Errors
    /// [`Error::BeyondTable`] for positions of `max_len` or more; [`Error::UnfitDocuments`] for those of other rows; a last dimension that is not a multiple of
    /// `head_dim`, fewer than two dimensions; a tensor that is not of f16, bf16, f32 or f64.
    pub fn apply(&self, x: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        let (len, heads) = self.check(x)?;
        let angles = self.angles(x, offset, len)?;
        if cuda::knows(x) {
            return self.on_cuda(x, &angles, heads);
        }
        let dtype = working_dtype(NAME, x.dtype())?;
        let wide = cast(x, dtype)?;
        let turned = if x.device().is_cpu() {
            let (cos, sin) = (angles.cos.to_dtype(dtype)?, angles.sin.to_dtype(dtype)?);
            let (layout, head_dim) = (self.config.layout, self.config.head_dim);
            let turn = RotaryOp { angles: Angles { cos, sin, ..angles }, layout, head_dim, heads };
            tape::apply_op1(&wide.contiguous()?, turn)?
        } else {
            let [cos, sin] = angles.of_lines()?;
            self.composed(&wide, &cos.to_dtype(dtype)?, &sin.to_dtype(dtype)?, heads)?
        };
        cast(&turned, x.dtype())
    }

    /// The angles of `len` places from `offset` on: consecutive positions, or those that the scope's rows have there.
    fn angles(&self, x: &Tensor, offset: usize, len: usize) -> candle_core::Result<Angles> {
        let max_len = self.config.max_len;
        let beyond = |offset, positions| Error::BeyondTable { operation: NAME, offset, positions, max_len };
        let context = RowContext::current();
        let end = offset.checked_add(len).ok_or_else(|| beyond(offset, len))?;
        let Some(of_rows) = context.positions(NAME, x.dim(0)?, offset..end)? else {
            if end > max_len {
                return Err(beyond(offset, len).into());
            }
            let part = |table: &Tensor| table.narrow(0, offset, len);
            return Ok(Angles { cos: part(&self.cos)?, sin: part(&self.sin)?, positions: None });
        };
        if x.rank() < 3 {
            let problem = format!("an input of shape {:?}: give rows of places", x.dims());
            return Err(Error::UnfitDocuments { operation: NAME, problem }.into());
        }
        let longest = context.longest(end);
        if longest > max_len {
            return Err(beyond(0, longest).into());
        }
        // Lines between: heads, if they are not in the last dimension.
        let between = x.dims()[1..x.rank() - 2].iter().product();
        let lines = of_rows.chunks(len.max(1)).flat_map(|row| repeat_n(row, between)).flatten().copied();
        let part = |table: &Tensor| table.narrow(0, 0, longest.max(1));
        Ok(Angles { cos: part(&self.cos)?, sin: part(&self.sin)?, positions: Some(lines.collect()) })
    }

    fn on_cuda(&self, x: &Tensor, angles: &Angles, heads: usize) -> candle_core::Result<Tensor> {
        let (tables, x) = (angles.of_lines()?, x.contiguous()?);
        let interleaved = self.config.layout == RotaryLayout::Interleaved;
        let turn = move |x: &Tensor, back| cuda::rotary(x, tables.each_ref(), heads, interleaved, back);
        let y = turn(&x.detach(), false)?;
        tape::explicit_op1(NAME, [&x], y, move |_, gradient| {
            Ok([Some(turn(&gradient.detach().contiguous()?, true)?)])
        })
    }

    /// Checks the tensor's shape and returns its number of positions and heads.
    fn check(&self, x: &Tensor) -> Result<(usize, usize)> {
        let head_dim = self.config.head_dim;
        let fits = |width: usize| width > 0 && width.is_multiple_of(head_dim);
        match *x.dims() {
            [.., positions, width] if fits(width) => Ok((positions, width / head_dim)),
            ref got => {
                let mut expected = got.to_vec();
                expected.resize(got.len().max(2), 1);
                let width = expected.pop().unwrap_or_default();
                expected.push(width.div_ceil(head_dim).max(1) * head_dim);
                Err(Error::ShapeMismatch { operation: NAME, tensor: "x", expected, got: got.to_vec() })
            }
        }
    }

    /// `cos` and `sin` have lines, which are repeated for those of `x`.
    fn composed(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
        let (lines, half) = cos.dims2()?;
        // The two elements of a pair get a dimension of their own.
        let (pair, [a, b]) = match self.config.layout {
            RotaryLayout::HalfSplit => (3, [2, half]),
            RotaryLayout::Interleaved => (4, [half, 2]),
        };
        let pairs = x.reshape(((), lines, heads, a, b))?;
        let apart = |index: usize| pairs.narrow(pair, index, 1)?.squeeze(pair);
        let (a, b) = (apart(0)?, apart(1)?);
        let (cos, sin) = (cos.reshape((lines, 1, half))?, sin.reshape((lines, 1, half))?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
        Tensor::stack(&[first, second], pair)?.reshape(x.shape())
    }
}

/// The angles of a tensor's lines, which are all its dimensions but the last.
struct Angles {
    /// `(positions, head_dim / 2)`.
    cos: Tensor,
    sin: Tensor,
    /// The position of each line. Without, lines have all positions in turn.
    positions: Option<Vec<u32>>,
}

impl Angles {
    /// Cosines and sines of lines, which may be repeated.
    fn of_lines(&self) -> candle_core::Result<[Tensor; 2]> {
        let Some(positions) = &self.positions else { return Ok([self.cos.clone(), self.sin.clone()]) };
        let positions = Tensor::new(&positions[..], self.cos.device())?;
        Ok([self.cos.index_select(&positions, 0)?, self.sin.index_select(&positions, 0)?])
    }
}

struct RotaryOp {
    angles: Angles,
    layout: RotaryLayout,
    head_dim: usize,
    heads: usize,
}

impl RotaryOp {
    /// Rotates forward, or for backward in the opposite direction.
    fn run<T: Real>(&self, x: &[T], is_backward: bool) -> candle_core::Result<Vec<T>> {
        let mut out = vec![T::zero(); x.len()];
        let (width, half) = (self.heads * self.head_dim, self.head_dim / 2);
        let Angles { cos, sin, positions } = &self.angles;
        let table = cos.dim(0)?;
        with_numbers(cos, |cos| {
            with_numbers(sin, |sin| {
                blocks([&mut out], of_rows(width), |at, [out]| {
                    vectorized!({
                        let rows = out.chunks_exact_mut(width).zip(x[at..].chunks_exact(width));
                        for (row, (out, x)) in (at / width..).zip(rows) {
                            let position = positions.as_ref().map_or(row % table, |own| own[row] as usize);
                            let angles = position * half..(position + 1) * half;
                            self.row(out, x, &cos[angles.clone()], &sin[angles], is_backward);
                        }
                    });
                });
                Ok(())
            })
        })?;
        Ok(out)
    }

    #[inline(always)]
    fn row<T: Real>(&self, out: &mut [T], x: &[T], cos: &[T], sin: &[T], is_backward: bool) {
        for (out, x) in out.chunks_exact_mut(self.head_dim).zip(x.chunks_exact(self.head_dim)) {
            match self.layout {
                RotaryLayout::HalfSplit => {
                    let ((x0, x1), (out0, out1)) = (x.split_at(cos.len()), out.split_at_mut(cos.len()));
                    let pairs = x0.iter().zip(x1).zip(out0.iter_mut().zip(out1));
                    for (((&a, &b), (out0, out1)), (&cos, &sin)) in pairs.zip(cos.iter().zip(sin)) {
                        let sin = if is_backward { -sin } else { sin };
                        (*out0, *out1) = (a * cos - b * sin, a * sin + b * cos);
                    }
                }
                RotaryLayout::Interleaved => {
                    let (pairs, outs) = (x.as_chunks::<2>().0, out.as_chunks_mut::<2>().0);
                    for ((&[a, b], out), (&cos, &sin)) in pairs.iter().zip(outs).zip(cos.iter().zip(sin)) {
                        let sin = if is_backward { -sin } else { sin };
                        *out = [a * cos - b * sin, a * sin + b * cos];
                    }
                }
            }
        }
    }
}

impl CustomOp1 for RotaryOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let out = match storage {
            CpuStorage::F32(_) => CpuStorage::F32(self.run(dense(storage, layout)?, false)?),
            CpuStorage::F64(_) => CpuStorage::F64(self.run(dense(storage, layout)?, false)?),
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((out, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        let (shape, device) = (gradient.shape(), gradient.device());
        let of_x = match gradient.dtype() {
            DType::F32 => {
                with_numbers(&gradient, |g| Tensor::from_vec(self.run::<f32>(g, true)?, shape, device))
            }
            _ => with_numbers(&gradient, |g| Tensor::from_vec(self.run::<f64>(g, true)?, shape, device)),
        };
        of_x.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::super::assert_agree;
    use super::*;
    use crate::Documents;

    /// The fused operation equals the composed one, gradient included, also where positions begin anew.
    #[test]
    fn composed_equals_fused() -> candle_core::Result<()> {
        for layout in [RotaryLayout::HalfSplit, RotaryLayout::Interleaved] {
            for shape in [&[2, 5, 18][..], &[5, 6], &[2, 3, 5, 6]] {
                let rotary = Rotary::new(&RotaryConfig { layout, ..RotaryConfig::new(6, 9) }, &Device::Cpu)?;
                let x = Var::from_tensor(&Tensor::randn(0f64, 1., shape, &Device::Cpu)?)?;
                let outer = Tensor::randn(0f64, 1., shape, &Device::Cpu)?;
                let heads = shape[shape.len() - 1] / 6;
                let compare = || {
                    let [cos, sin] = rotary.angles(&x, 3, 5)?.of_lines()?;
                    let [cos, sin] = [cos.to_dtype(DType::F64)?, sin.to_dtype(DType::F64)?];
                    let both = [rotary.composed(&x, &cos, &sin, heads)?, rotary.apply(&x, 3)?];
                    assert_agree(both, |y| (y * &outer)?.sum_all(), &[&x], 1e-14, &format!("{layout:?}"))
                };
                compare()?;
                if shape.len() > 2 {
                    RowContext {
                        documents: Some(Documents::new([vec![2, 4], vec![5, 3, 3]])?),
                        ..Default::default()
                    }
                    .scope(compare)?;
                }
            }
        }
        Ok(())
    }
}
