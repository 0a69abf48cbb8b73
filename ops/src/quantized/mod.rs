//! Frozen weights in few bits: quantized once, and multiplied by tiles that are widened on the way.
//!
//! The formats are those of bitsandbytes, as it writes them on a CPU: 4 bits a number with a scale for each block of a row ([`nf4`](crate::nf4)), and
//! 8 bits with a scale for each row ([`Int8Matrix`]). A matrix is bytes, row by row, and the scales of the whole, so that a range of rows, or of
//! blocks of all rows, is a part of a matrix that equals the whole there.

mod int8;
mod product;

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use crate::nf4::{BLOCK, BLOCK_BYTES, Nf4Matrix, Nf4Scales};

pub use int8::Int8Matrix;
pub use product::QuantizedLinear;
pub(crate) use product::Side;

/// How numbers are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// 4 bits a number, and a scale for each block of 64 (NF4, with scales in 8 bits).
    Nf4,
    /// 4 bits a number, and a scale in f32 for each block of 64 (NF4 without double quantization): as a folder may have them. Nothing is
    /// quantized to it here.
    Nf4Wide,
    /// 8 bits a number, and a scale for each row (LLM.int8).
    Int8,
}

impl Format {
    /// Returns the bits of a number, without scales.
    pub fn bits(self) -> u8 {
        match self {
            Self::Nf4 | Self::Nf4Wide => 4,
            Self::Int8 => 8,
        }
    }

    /// Returns the numbers that rows are divided by only as a whole.
    pub fn block(self) -> usize {
        match self {
            Self::Nf4 | Self::Nf4Wide => BLOCK,
            Self::Int8 => 1,
        }
    }

    /// Returns the bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Nf4 | Self::Nf4Wide => BLOCK_BYTES,
            Self::Int8 => 1,
        }
    }

    /// Returns the bytes of a row of this many numbers.
    ///
    /// # Errors
    /// A number of columns that blocks do not divide.
    pub fn row_bytes(self, columns: usize) -> Result<usize> {
        match self {
            Self::Nf4 | Self::Nf4Wide => Nf4Matrix::row_bytes(columns),
            Self::Int8 => Ok(columns),
        }
    }

    /// Returns the bytes of the scales of a whole matrix, as [`QuantizedMatrix::scales`] has them.
    pub fn scale_bytes(self, rows: usize, columns: usize) -> usize {
        match self {
            Self::Nf4 | Self::Nf4Wide => Nf4Matrix::scale_bytes(rows, columns, self == Self::Nf4),
            Self::Int8 => size_of::<f32>() * rows,
        }
    }

    /// Returns the number of scales of a row of this many numbers.
    pub fn scales_per_row(self, columns: usize) -> usize {
        match self {
            Self::Nf4 | Self::Nf4Wide => columns / BLOCK,
            Self::Int8 => 1,
        }
    }
}

/// A matrix in few bits.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum QuantizedMatrix {
    /// In 4 bits.
    Nf4(Nf4Matrix),
    /// In 8 bits.
    Int8(Int8Matrix),
}

impl QuantizedMatrix {
    /// Quantizes a matrix.
    ///
    /// # Shapes
    /// `(rows, columns)`.
    ///
    /// # Errors
    /// Those of [`Nf4Matrix::quantize`] and [`Int8Matrix::quantize`]; [`Format::Nf4Wide`].
    pub fn quantize(format: Format, matrix: &Tensor) -> Result<Self> {
        Ok(match format {
            Format::Nf4 => Self::Nf4(Nf4Matrix::quantize(matrix)?),
            Format::Nf4Wide => bail!("nothing is quantized to 4 bits with scales in f32: a folder has them"),
            Format::Int8 => Self::Int8(Int8Matrix::quantize(matrix)?),
        })
    }

    /// Returns how its numbers are held.
    pub fn format(&self) -> Format {
        match self {
            Self::Nf4(matrix) if matrix.is_double() => Format::Nf4,
            Self::Nf4(_) => Format::Nf4Wide,
            Self::Int8(_) => Format::Int8,
        }
    }

    /// Returns the bytes of all rows, one after the other.
    pub fn blocks(&self) -> &[u8] {
        match self {
            Self::Nf4(matrix) => matrix.blocks(),
            Self::Int8(matrix) => matrix.codes(),
        }
    }

    /// Returns the bytes of the scales.
    pub fn scales(&self) -> Vec<u8> {
        match self {
            Self::Nf4(matrix) => matrix.scales(),
            Self::Int8(matrix) => matrix.scales().iter().flat_map(|scale| scale.to_le_bytes()).collect(),
        }
    }

    /// Returns the whole matrix in f32.
    ///
    /// # Errors
    /// candle's.
    pub fn widen(&self) -> Result<Tensor> {
        match self {
            Self::Nf4(matrix) => matrix.widen(),
            Self::Int8(matrix) => matrix.widen(),
        }
    }

    /// Returns the number of numbers in a row.
    pub fn columns(&self) -> usize {
        match self {
            Self::Nf4(matrix) => matrix.columns(),
            Self::Int8(matrix) => matrix.columns(),
        }
    }
}

/// A part of a matrix in few bits, whose tensors may have their bytes only while they are needed, as where a model is sharded.
#[derive(Debug, Clone)]
pub struct QuantizedPart {
    /// How its numbers are held.
    pub format: Format,
    /// Bytes of this part's rows, `(outputs, bytes of a row)`.
    pub blocks: Tensor,
    /// Bytes of the scales of the whole matrix.
    pub scales: Tensor,
    /// Of each row, the number of its first scale in the whole matrix.
    pub rows: Arc<[usize]>,
}

impl QuantizedPart {
    /// Returns the layer of this part, which reads the scales.
    ///
    /// # Errors
    /// Those of [`QuantizedLinear::new`].
    pub fn layer(&self) -> Result<QuantizedLinear> {
        QuantizedLinear::new(self.format, self.blocks.clone(), &self.scales, self.rows.clone())
    }

    /// The number of inputs and of outputs.
    pub(crate) fn dims(&self) -> Result<(usize, usize)> {
        let (outputs, bytes) = self.blocks.dims2()?;
        Ok((bytes / self.format.block_bytes() * self.format.block(), outputs))
    }
}

/// The scales of a whole matrix.
#[derive(Debug, Clone)]
enum Scales {
    Nf4(Nf4Scales),
    Int8(Vec<f32>),
}

impl Scales {
    /// The inverse of [`QuantizedMatrix::scales`].
    fn read(format: Format, bytes: &[u8]) -> Self {
        match format {
            Format::Nf4 | Format::Nf4Wide => Self::Nf4(Nf4Scales::read(bytes, format == Format::Nf4)),
            Format::Int8 => {
                Self::Int8(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
            }
        }
    }

    fn format(&self) -> Format {
        match self {
            Self::Nf4(scales) if scales.is_double() => Format::Nf4,
            Self::Nf4(_) => Format::Nf4Wide,
            Self::Int8(_) => Format::Int8,
        }
    }

    /// The number of scales that there may be.
    fn count(&self) -> usize {
        match self {
            Self::Nf4(scales) => scales.count(),
            Self::Int8(scales) => scales.len(),
        }
    }

    /// Widens blocks of a row, whose first scale is that of this number, from this block of the row on.
    fn widen<T: Copy>(
        &self,
        blocks: &[u8],
        (first, from): (usize, usize),
        of: impl Fn(f32) -> T,
        out: &mut [T],
    ) {
        match self {
            Self::Nf4(scales) => scales.widen(blocks, first + from, of, out),
            Self::Int8(scales) => int8::widen(blocks, scales[first], of, out),
        }
    }
}
