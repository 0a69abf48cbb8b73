//! Weights in 4 bits; [`QuantizedLinear`](crate::quantized::QuantizedLinear) multiplies by them.
//!
//! The format is that of QLoRA, as bitsandbytes writes it. Each block of [`BLOCK`] numbers of a row has a scale, its largest
//! magnitude, and for each number the index of the nearest of 16 values between -1 and 1 (NF4: those that split a normal
//! distribution evenly). The scales are quantized as well, less their mean, in groups of [`GROUP`]: a byte each, the index of
//! one of 256 values, and a scale in f32 for each group. That is 4.127 bits a number. Without this double quantization each scale is a group of its
//! own, and its byte stands for 1: 4.625 bits a number.
//!
//! A block is [`BLOCK_BYTES`] bytes: the byte of its scale, then two numbers in each byte, the first in the upper half. Blocks
//! do not cross rows, so that a range of rows, or of blocks of all rows, is a part of a matrix that equals the whole there.

mod mean;
mod quantize;
mod values;

pub use quantize::Nf4Matrix;
pub(crate) use quantize::Nf4Scales;

/// Returns the values that the 16 codes of a number stand for.
pub fn values() -> [f32; 16] {
    values::NF4
}

/// Returns the values that the 256 codes of a scale stand for.
pub fn scale_values() -> [f32; 256] {
    *values::SCALES
}

/// Numbers with one scale.
pub const BLOCK: usize = 64;

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 1 + BLOCK / 2;

/// Scales with one scale of their own.
pub const GROUP: usize = 256;
