//! A matrix in 8 bits.

use candle_core::{DType, Device, Result, Tensor, bail};

/// The largest code, as the inverse that bitsandbytes multiplies by.
const INVERSE: f32 = 7.874_016e-3;

/// A matrix in 8 bits: of each row the largest magnitude, and for each number the nearest of 255 multiples of a 127th of it.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ops::quantized::Int8Matrix;
///
/// let quantized = Int8Matrix::quantize(&Tensor::new(&[[0.5f32, -1.0, 0.126], [0.0, 0.0, 0.0]], &Device::Cpu)?)?;
/// assert_eq!(quantized.codes().iter().map(|code| *code as i8).collect::<Vec<_>>(), [64, -127, 16, 0, 0, 0]);
/// assert_eq!(quantized.scales(), [1.0, 0.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Source
/// Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale" (2022), section 2.1.
#[derive(Debug, Clone, PartialEq)]
pub struct Int8Matrix {
    columns: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Int8Matrix {
    /// Quantizes a matrix, to the bits of bitsandbytes' `Linear8bitLt` on a CPU, which first rounds weights to f16. Rows of zeros are zeros.
    ///
    /// # Shapes
    /// `(rows, columns)`, of f32, f16, bf16 or f64.
    ///
    /// # Errors
    /// Numbers that are not finite in f16.
    pub fn quantize(matrix: &Tensor) -> Result<Self> {
        let (_, columns) = matrix.dims2()?;
        // From f64 by way of f32, as weights are read: the same bits whatever type they are held in.
        let halves = matrix.to_dtype(DType::F32)?.to_dtype(DType::F16)?;
        let numbers = halves.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        if numbers.iter().any(|x| !x.is_finite()) {
            bail!("a weight has numbers that are not finite in f16: they have no place in 8 bits")
        }
        let (mut codes, mut scales) = (Vec::with_capacity(numbers.len()), Vec::new());
        for row in numbers.chunks_exact(columns.max(1)) {
            let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            // As PyTorch divides a number by a tensor.
            let factor = if largest == 0.0 { 0.0 } else { 1.0 / largest * 127.0 };
            codes.extend(row.iter().map(|x| (x * factor).round_ties_even() as i8 as u8));
            scales.push(largest);
        }
        Ok(Self { columns, codes, scales })
    }

    /// Makes a matrix of codes and scales as bitsandbytes keeps them: see [`codes`](Self::codes) and [`scales`](Self::scales).
    ///
    /// # Errors
    /// Numbers of codes and scales that are not those of rows of so many columns.
    pub fn from_codes(columns: usize, codes: Vec<u8>, scales: Vec<f32>) -> Result<Self> {
        if codes.len() != columns * scales.len() {
            bail!("codes and scales in 8 bits are not those of a matrix of {columns} columns")
        }
        Ok(Self { columns, codes, scales })
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// The codes of all rows, one after the other: bytes of i8, as bitsandbytes keeps them.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The largest magnitude of each row.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// The whole matrix in f32.
    ///
    /// # Errors
    /// candle's.
    pub fn widen(&self) -> Result<Tensor> {
        let mut wide = vec![0.0; self.codes.len()];
        let rows =
            self.codes.chunks_exact(self.columns.max(1)).zip(wide.chunks_exact_mut(self.columns.max(1)));
        rows.zip(&self.scales).for_each(|((codes, out), scale)| widen(codes, *scale, |x| x, out));
        Tensor::from_vec(wide, (self.scales.len(), self.columns), &Device::Cpu)
    }
}

/// Widens codes of a row.
pub(super) fn widen<T>(codes: &[u8], scale: f32, of: impl Fn(f32) -> T, out: &mut [T]) {
    for (out, code) in out.iter_mut().zip(codes) {
        *out = of(f32::from(*code as i8) * scale * INVERSE);
    }
}
