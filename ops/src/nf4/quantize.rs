//! A matrix in 4 bits.

use candle_core::{DType, Tensor, bail};

use super::mean::mean;
use super::values::{NF4, SCALES, nearest_nf4, nearest_scale};
use super::{BLOCK, BLOCK_BYTES, GROUP};
use crate::blocks::blocks_of_work;

/// Divisor of a block of zeros.
const SMALLEST: f32 = 1e-38;

/// A matrix in 4 bits.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ops::nf4::Nf4Matrix;
///
/// let weight = Tensor::randn(0f32, 1.0, (3, 128), &Device::Cpu)?;
/// let quantized = Nf4Matrix::quantize(&weight)?;
/// let gap = (quantized.widen()? - &weight)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(gap < 0.6, "{gap}");
/// assert_eq!((quantized.codes().len(), quantized.scale_codes().len()), (3 * 64, 3 * 2));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Nf4Matrix {
    columns: usize,
    blocks: Vec<u8>,
    scales: Nf4Scales,
}

/// How the bytes of scales are widened.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Nf4Scales {
    /// The mean of all scales.
    offset: f32,
    /// The scale of each group of scales.
    groups: Vec<f32>,
    /// The number of scales in a group.
    size: usize,
}

impl Nf4Matrix {
    /// Quantizes a matrix, to the bits that bitsandbytes' CPU build writes in NF4 with blocks of 64 and double quantization.
    ///
    /// # Shapes
    /// `(rows, columns)`, of f32, f16, bf16 or f64.
    ///
    /// # Errors
    /// A number of columns that is no multiple of [`BLOCK`]; numbers that are not finite.
    pub fn quantize(matrix: &Tensor) -> candle_core::Result<Self> {
        let (_, columns) = matrix.dims2()?;
        Self::row_bytes(columns)?;
        let numbers = matrix.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let (numbers, _) = numbers.as_chunks::<BLOCK>();
        let largest = |block: &[f32; BLOCK]| block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let wide: Vec<f32> = numbers.iter().map(largest).collect();
        // The largest of a block passes over NaN.
        if numbers.as_flattened().iter().any(|x| !x.is_finite()) {
            bail!("a weight has numbers that are not finite: they have no place in 4 bits")
        }
        let (scales, codes) = Nf4Scales::quantize(&wide);
        let mut blocks = vec![0; numbers.len() * BLOCK_BYTES];
        let size = (1 << 14) / BLOCK * BLOCK_BYTES;
        blocks_of_work([&mut blocks], size, numbers.len() * BLOCK, |at, [part]| {
            let first = at / BLOCK_BYTES;
            let (part, _) = part.as_chunks_mut::<BLOCK_BYTES>();
            for (number, block) in (first..).zip(part) {
                *block = block_of(&numbers[number], wide[number], codes[number]);
            }
        });
        Ok(Self { columns, blocks, scales })
    }

    /// Makes a matrix of codes and scales as bitsandbytes keeps them: see [`codes`](Self::codes) and [`scale_codes`](Self::scale_codes);
    /// `groups` are the scales of groups of scales, `offset` is their mean.
    ///
    /// # Errors
    /// Numbers of codes or scales that are not those of rows of so many columns.
    pub fn from_codes(
        columns: usize,
        codes: &[u8],
        scale_codes: &[u8],
        groups: Vec<f32>,
        offset: f32,
    ) -> candle_core::Result<Self> {
        let size = GROUP;
        Self::from_parts(columns, codes, scale_codes, Nf4Scales { offset, groups, size })
    }

    /// The same of scales in f32, without double quantization: each is a group of its own.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use ops::nf4::Nf4Matrix;
    ///
    /// // The codes 0 and 15 stand for -1 and 1.
    /// let matrix = Nf4Matrix::from_wide_scales(64, &[0x0f; 32], vec![0.3])?;
    /// assert_eq!(matrix.widen()?.flatten_all()?.to_vec1::<f32>()?[..2], [-0.3, 0.3]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`from_codes`](Self::from_codes).
    pub fn from_wide_scales(columns: usize, codes: &[u8], scales: Vec<f32>) -> candle_core::Result<Self> {
        let ones = vec![nearest_scale(1.0); scales.len()];
        Self::from_parts(columns, codes, &ones, Nf4Scales { offset: 0.0, groups: scales, size: 1 })
    }

    fn from_parts(
        columns: usize,
        codes: &[u8],
        scale_codes: &[u8],
        scales: Nf4Scales,
    ) -> candle_core::Result<Self> {
        Self::row_bytes(columns)?;
        let (count, (codes, rest)) = (scale_codes.len(), codes.as_chunks::<{ BLOCK / 2 }>());
        let are_rows = (count * BLOCK).is_multiple_of(columns.max(1));
        if codes.len() != count || !rest.is_empty() || !are_rows || scales.count() < count {
            bail!("codes and scales in 4 bits are not those of a matrix of {columns} columns")
        }
        let mut blocks = Vec::with_capacity(count * BLOCK_BYTES);
        for (scale, codes) in scale_codes.iter().zip(codes) {
            blocks.push(*scale);
            blocks.extend_from_slice(codes);
        }
        Ok(Self { columns, blocks, scales })
    }

    /// Whether scales are in 8 bits themselves, as [`quantize`](Self::quantize) makes them.
    pub fn is_double(&self) -> bool {
        self.scales.is_double()
    }

    /// Bytes of a row of this many numbers.
    ///
    /// # Errors
    /// A number of columns that is no multiple of [`BLOCK`].
    pub fn row_bytes(columns: usize) -> candle_core::Result<usize> {
        match columns.is_multiple_of(BLOCK) {
            true => Ok(columns / BLOCK * BLOCK_BYTES),
            false => {
                bail!(
                    "a weight of {columns} inputs has no 4 bits: they must be a multiple of {BLOCK}, a block"
                )
            }
        }
    }

    /// Bytes of the scales of groups of a matrix, as [`scales`](Self::scales) has them; with `is_double` those of scales in 8 bits.
    pub fn scale_bytes(rows: usize, columns: usize, is_double: bool) -> usize {
        let size = if is_double { GROUP } else { 1 };
        size_of::<f32>() * (1 + (rows * columns / BLOCK).div_ceil(size))
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// The bytes of all rows, one after the other.
    pub fn blocks(&self) -> &[u8] {
        &self.blocks
    }

    /// The bytes of the mean of all scales and of the scales of groups, little-endian f32: what widens the bytes of scales.
    pub fn scales(&self) -> Vec<u8> {
        let Nf4Scales { offset, groups, .. } = &self.scales;
        std::iter::once(offset).chain(groups).flat_map(|x| x.to_le_bytes()).collect()
    }

    /// The indices of the numbers' values, two in each byte, as bitsandbytes keeps them.
    pub fn codes(&self) -> Vec<u8> {
        self.blocks.as_chunks::<BLOCK_BYTES>().0.iter().flat_map(|block| &block[1..]).copied().collect()
    }

    /// The indices of the scales' values, as bitsandbytes keeps them.
    pub fn scale_codes(&self) -> Vec<u8> {
        self.blocks.as_chunks::<BLOCK_BYTES>().0.iter().map(|block| block[0]).collect()
    }

    /// The whole matrix in f32.
    ///
    /// # Errors
    /// candle's.
    pub fn widen(&self) -> candle_core::Result<Tensor> {
        let mut wide = vec![0.0; self.blocks.len() / BLOCK_BYTES * BLOCK];
        self.scales.widen(&self.blocks, 0, |x| x, &mut wide);
        Tensor::from_vec(wide, ((), self.columns), &candle_core::Device::Cpu)
    }
}

impl Nf4Scales {
    /// Quantizes scales: these, and the byte of each scale.
    fn quantize(wide: &[f32]) -> (Self, Vec<u8>) {
        let offset = if wide.is_empty() { 0.0 } else { mean(wide) };
        let mut codes = Vec::with_capacity(wide.len());
        let mut of_group = |group: &[f32]| {
            let largest = group.iter().fold(0f32, |largest, x| largest.max((x - offset).abs()));
            let code =
                |x: &f32| if largest == 0.0 { 0 } else { nearest_scale((x - offset) * (1.0 / largest)) };
            codes.extend(group.iter().map(code));
            largest
        };
        let groups = wide.chunks(GROUP).map(&mut of_group).collect();
        (Self { offset, groups, size: GROUP }, codes)
    }

    /// The inverse of [`Nf4Matrix::scales`], of scales in 8 bits or not.
    pub(crate) fn read(bytes: &[u8], is_double: bool) -> Self {
        let size = if is_double { GROUP } else { 1 };
        let mut numbers = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        Self { offset: numbers.next().unwrap_or_default(), groups: numbers.collect(), size }
    }

    /// Whether scales are in 8 bits.
    pub(crate) fn is_double(&self) -> bool {
        self.size == GROUP
    }

    /// Number of scales that its groups may have.
    pub(crate) fn count(&self) -> usize {
        self.groups.len() * self.size
    }

    /// Widens blocks, of which the first is the matrix's block `first`.
    pub(crate) fn widen<T: Copy>(&self, blocks: &[u8], first: usize, of: impl Fn(f32) -> T, out: &mut [T]) {
        let (blocks, out) = (blocks.as_chunks::<BLOCK_BYTES>().0, out.as_chunks_mut::<BLOCK>().0);
        for ((number, block), out) in (first..).zip(blocks).zip(out) {
            let scale = SCALES[usize::from(block[0])] * self.groups[number / self.size] + self.offset;
            let values = NF4.map(|value| of(value * scale));
            for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(&block[1..]) {
                *pair = [values[usize::from(byte >> 4)], values[usize::from(byte & 15)]];
            }
        }
    }
}

/// The bytes of a block with this scale, whose byte is `code`.
fn block_of(numbers: &[f32; BLOCK], scale: f32, code: u8) -> [u8; BLOCK_BYTES] {
    let factor = 1.0 / scale.max(SMALLEST);
    let mut block = [code; BLOCK_BYTES];
    for (byte, pair) in block[1..].iter_mut().zip(numbers.as_chunks::<2>().0) {
        let [upper, lower] = pair.map(|x| nearest_nf4((x * factor).clamp(-1.0, 1.0)));
        *byte = upper << 4 | lower;
    }
    block
}
