//! Linear layer of a weight in few bits.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Module, Shape, Tensor, WithDType, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{Format, QuantizedMatrix, Scales};
use crate::blocks::has_one_thread;
use crate::dense::{dense, with_numbers};
use crate::dtype::working_dtype;
use crate::product::{Element, Matrix, ProductConfig};
use crate::recompute::copied;
use crate::{Error, Precision, kept_result, tape};

const NAME: &str = "linear in few bits";

/// Numbers of a tile: a multiple of a block, large enough for a product, small enough for a core's cache.
const TILE: usize = 1 << 20;

/// `x w'` of a frozen weight in 4 or 8 bits, whole or a part of a whole one.
///
/// # Shapes
/// Input `(.., inputs)`, result `(.., outputs)`.
///
/// # Cost
/// A product forward, and one backward, for the input. Each thread widens tiles of about 2^20 numbers, to the dtype of the input, and
/// multiplies by them: never by a whole widened matrix. A result of a product is the same sum as with one.
///
/// ```
/// use candle_core::{Device, Module, Tensor, Var};
/// use ops::quantized::{Format, QuantizedLinear, QuantizedMatrix};
///
/// let (x, weight) = (Var::ones((5, 128), candle_core::DType::F32, &Device::Cpu)?, Tensor::randn(0f32, 1.0, (3, 128), &Device::Cpu)?);
/// let quantized = QuantizedMatrix::quantize(Format::Nf4, &weight)?;
/// let y = QuantizedLinear::whole(&quantized)?.forward(&x)?;
/// let gap = (&y - x.matmul(&quantized.widen()?.t()?)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(gap < 1e-4 && y.sum_all()?.backward()?.get(&x).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct QuantizedLinear {
    blocks: Tensor,
    weight: Weight,
}

/// A weight, but for the bytes of its blocks.
#[derive(Debug, Clone)]
struct Weight {
    inputs: usize,
    scales: Arc<Scales>,
    /// Of each row, the number of its first scale in the whole matrix.
    rows: Arc<[usize]>,
}

impl QuantizedLinear {
    /// A layer of these blocks, a part of a matrix in few bits: `scales` are those of the whole ([`QuantizedMatrix::scales`]),
    /// and `rows` says which scale of the whole is the first one of each row here.
    ///
    /// # Shapes
    /// Both of u8: `blocks` `(outputs, bytes of a row)`, `scales` flat.
    ///
    /// # Errors
    /// Tensors of other shapes or dtypes, or not on a CPU; a row that is not in the whole matrix.
    pub fn new(
        format: Format,
        blocks: Tensor,
        scales: &Tensor,
        rows: Arc<[usize]>,
    ) -> candle_core::Result<Self> {
        let (outputs, bytes) = blocks.dims2()?;
        if !blocks.device().is_cpu() || blocks.dtype() != DType::U8 {
            bail!(
                "{NAME}: the weight must be of u8 and on a CPU; there is no kernel for other devices so far"
            )
        }
        let scales = Scales::read(format, &scales.flatten_all()?.to_vec1::<u8>()?);
        let inputs = bytes / format.block_bytes() * format.block();
        let last = rows.iter().max().map_or(0, |first| first + format.scales_per_row(inputs));
        if rows.len() != outputs || !bytes.is_multiple_of(format.block_bytes()) || last > scales.count() {
            bail!("{NAME}: {outputs} rows of {bytes} bytes are no part of the matrix that the scales are of")
        }
        Ok(Self { blocks, weight: Weight { inputs, scales: Arc::new(scales), rows } })
    }

    /// Returns the sum of the squares of each row, in f64, computed tile by tile as a product is.
    ///
    /// # Shapes
    /// `(outputs)`.
    ///
    /// # Errors
    /// candle's.
    pub fn squares(&self) -> candle_core::Result<Tensor> {
        let (outputs, per_row) = (self.weight.rows.len(), self.weight.blocks_per_row());
        let each = (TILE / self.weight.inputs.max(1)).max(1);
        let starts: Vec<usize> = (0..outputs).step_by(each).collect();
        let squares = with_numbers(&self.blocks, |blocks: &[u8]| {
            let of_tile = |start: &usize| {
                let rows = *start..(start + each).min(outputs);
                let wide = self.weight.tile::<f32>(blocks, rows, 0..per_row);
                let of_row = |row: &[f32]| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
                wide.chunks_exact(self.weight.inputs).map(of_row).collect()
            };
            let parts: Vec<Vec<f64>> = starts.par_iter().map(of_tile).collect();
            Ok(parts.concat())
        });
        Tensor::from_vec(squares?, outputs, self.blocks.device())
    }

    /// A layer of a whole matrix.
    ///
    /// # Errors
    /// candle's.
    pub fn whole(matrix: &QuantizedMatrix) -> candle_core::Result<Self> {
        let (format, columns) = (matrix.format(), matrix.columns());
        let (bytes, scales) = (format.row_bytes(columns)?, matrix.scales());
        let device = candle_core::Device::Cpu;
        let blocks =
            Tensor::from_slice(matrix.blocks(), (matrix.blocks().len() / bytes.max(1), bytes), &device)?;
        let rows = (0..blocks.dim(0)?).map(|row| row * format.scales_per_row(columns)).collect();
        Self::new(format, blocks, &Tensor::from_slice(&scales, scales.len(), &device)?, rows)
    }
}

impl QuantizedLinear {
    /// `x w'`, summed over inputs, or `x w`, over outputs, without a graph.
    ///
    /// # Shapes
    /// `(rows, inputs)` or `(rows, outputs)`, contiguous, to `(rows, outputs)` or `(rows, inputs)`.
    pub(crate) fn product(
        &self,
        x: &Tensor,
        side: Side,
        precision: Precision,
    ) -> candle_core::Result<Tensor> {
        let results = match side {
            Side::Inputs => self.weight.rows.len(),
            Side::Outputs => self.weight.inputs,
        };
        match x.dtype() {
            DType::F32 => self.typed_product::<f32>(x, side, results, precision),
            DType::F16 => self.typed_product::<f16>(x, side, results, precision),
            DType::BF16 => self.typed_product::<bf16>(x, side, results, precision),
            _ => self.typed_product::<f64>(x, side, results, precision),
        }
    }

    fn typed_product<T: Element>(
        &self,
        x: &Tensor,
        side: Side,
        results: usize,
        precision: Precision,
    ) -> candle_core::Result<Tensor> {
        let found = with_numbers(&self.blocks, |blocks: &[u8]| {
            with_numbers(x, |x: &[T]| self.weight.times(x, blocks, side, precision))
        });
        Tensor::from_vec(found?, (x.dim(0)?, results), x.device())
    }
}

impl Module for QuantizedLinear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        working_dtype(NAME, x.dtype())?;
        if x.dims().last() != Some(&self.weight.inputs) {
            let mut expected = x.dims().to_vec();
            expected.pop();
            expected.push(self.weight.inputs);
            let got = x.dims().to_vec();
            return Err(Error::ShapeMismatch { operation: NAME, tensor: "input", expected, got }.into());
        }
        let x = x.contiguous()?;
        kept_result(|known| {
            let precision = Precision::current();
            let op = Product { weight: self.weight.clone(), precision, known };
            tape::apply_op2(&x, &self.blocks, op)
        })
    }
}

/// The operation: input and blocks to output.
struct Product {
    weight: Weight,
    precision: Precision,
    /// The result of an earlier run, where the operation is recomputed.
    known: Option<Tensor>,
}

/// Which side of the weight is summed over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Inputs,
    Outputs,
}

impl Weight {
    fn blocks_per_row(&self) -> usize {
        self.inputs / self.scales.format().block()
    }

    /// Widens a rectangle: rows, and blocks of each.
    fn tile<T: Element>(&self, blocks: &[u8], rows: Range<usize>, of_row: Range<usize>) -> Vec<T> {
        let (format, per_row) = (self.scales.format(), self.blocks_per_row());
        let (bytes, columns) = (per_row * format.block_bytes(), of_row.len() * format.block());
        let mut tile = vec![T::Sum::from_f64(0.0); rows.len() * columns];
        for (row, out) in rows.zip(tile.chunks_exact_mut(columns.max(1))) {
            let start = row * bytes + of_row.start * format.block_bytes();
            let own = &blocks[start..start + of_row.len() * format.block_bytes()];
            let wide = |x: f32| T::Sum::from_f64(x.into());
            self.scales.widen(own, (self.rows[row], of_row.start), wide, out);
        }
        T::narrow(tile)
    }

    /// `x w'`, summed over inputs, or `x w`, over outputs. Each tile has all that its results are sums of.
    fn times<T: Element>(
        &self,
        x: &[T],
        blocks: &[u8],
        side: Side,
        precision: Precision,
    ) -> candle_core::Result<Vec<T>> {
        let (outputs, per_row, block) =
            (self.rows.len(), self.blocks_per_row(), self.scales.format().block());
        // The number of results in a row, and of those that a tile makes of them, in its unit: rows or blocks.
        let (summed, units, size) = match side {
            Side::Inputs => (self.inputs, outputs, 1),
            Side::Outputs => (outputs, per_row, block),
        };
        let (count, results) = (x.len() / summed.max(1), units * size);
        if summed == 0 || count * results == 0 {
            return Ok(T::narrow(vec![T::Sum::from_f64(0.0); count * results]));
        }
        let each = (TILE / (summed * size)).clamp(1, units).next_multiple_of(if size < 16 { 16 } else { 1 });
        let x = Matrix::new(x, count, summed, summed);
        let mut how = ProductConfig { precision, in_parallel: false };
        let tiles: Vec<Range<usize>> =
            (0..units).step_by(each).map(|at| at..(at + each).min(units)).collect();
        let is_one = tiles.len() == 1;
        if is_one {
            how = how.in_parallel();
        }
        let product = |tile: &Range<usize>| match side {
            Side::Inputs => {
                let wide = self.tile::<T>(blocks, tile.clone(), 0..per_row);
                T::product((x, Matrix::new(&wide, tile.len(), summed, summed).t()), how)
            }
            Side::Outputs => {
                let (wide, columns) = (self.tile::<T>(blocks, 0..outputs, tile.clone()), tile.len() * block);
                T::product((x, Matrix::new(&wide, summed, columns, columns)), how)
            }
        };
        let parts: Vec<Vec<T::Sum>> = match is_one || has_one_thread() {
            true => tiles.iter().map(product).collect::<candle_core::Result<_>>()?,
            false => tiles.par_iter().map(product).collect::<candle_core::Result<_>>()?,
        };
        Ok(T::narrow(side_by_side(parts, count)))
    }
}

/// Puts matrices of `rows` rows beside one another.
fn side_by_side<T: Copy>(mut parts: Vec<Vec<T>>, rows: usize) -> Vec<T> {
    if parts.len() == 1 {
        return parts.remove(0);
    }
    let mut out = Vec::with_capacity(parts.iter().map(Vec::len).sum());
    for row in 0..rows {
        for part in &parts {
            let width = part.len() / rows;
            out.extend_from_slice(&part[row * width..(row + 1) * width]);
        }
    }
    out
}

impl Product {
    fn forward<T: Element>(
        &self,
        (x, x_layout): (&CpuStorage, &Layout),
        (blocks, of_blocks): (&CpuStorage, &Layout),
    ) -> candle_core::Result<CpuStorage> {
        let (x, blocks) = (dense::<T>(x, x_layout)?, dense::<u8>(blocks, of_blocks)?);
        Ok(T::to_cpu_storage_owned(self.weight.times(x, blocks, Side::Inputs, self.precision)?))
    }
}

impl CustomOp2 for Product {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        blocks: &CpuStorage,
        of_blocks: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let mut dims = x_layout.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = self.weight.rows.len();
        }
        if let Some(known) = self.known.as_ref().filter(|known| known.dims() == dims) {
            return copied(known);
        }
        let (left, right) = ((x, x_layout), (blocks, of_blocks));
        let found = match x {
            CpuStorage::F32(_) => self.forward::<f32>(left, right),
            CpuStorage::F64(_) => self.forward::<f64>(left, right),
            CpuStorage::F16(_) => self.forward::<f16>(left, right),
            CpuStorage::BF16(_) => self.forward::<bf16>(left, right),
            _ => bail!("{NAME}: not a float dtype"),
        };
        Ok((found?, Shape::from(dims)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        blocks: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        if !x.track_op() {
            return Ok((None, None));
        }
        let gradient = gradient.contiguous()?.reshape(((), self.weight.rows.len()))?;
        let layer = QuantizedLinear { blocks: blocks.clone(), weight: self.weight.clone() };
        let of_x = layer.product(&gradient, Side::Outputs, self.precision)?;
        Ok((Some(of_x.reshape(x.shape())?), None))
    }
}
