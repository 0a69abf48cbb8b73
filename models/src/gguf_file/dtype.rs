//! Types of tensors in a GGUF file.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Tensor};

use crate::{Error, Result, finite};

/// Type of the matrices of a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GgufType {
    /// 32 bits a weight.
    F32,
    /// 16 bits a weight.
    F16,
    /// 16 bits a weight, with the range of f32.
    Bf16,
    /// 8.5 bits a weight, in blocks of 32.
    Q8_0,
    /// 4.5 bits a weight, in blocks of 32.
    Q4_0,
    /// 4.5 bits a weight, in blocks of 256 with scales of their own parts.
    Q4K,
    /// 6.6 bits a weight, in blocks of 256: of the head, where other matrices have 4 bits.
    Q6K,
}

/// How a file holds a tensor that is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Stored {
    /// As numbers.
    Plain(safetensors::Dtype),
    /// In blocks of numbers with common scales.
    Blocks(GgmlDType),
    /// In few bits, with scales in other tensors: the name of the type.
    Bits(&'static str),
    /// In a type that cannot be read, by its number.
    Unknown(u32),
}

/// Returns the type with this number.
pub(crate) fn stored(number: u32) -> Stored {
    use GgmlDType as G;
    const BLOCKS: [(u32, GgmlDType); 10] = [
        (2, G::Q4_0),
        (3, G::Q4_1),
        (6, G::Q5_0),
        (7, G::Q5_1),
        (8, G::Q8_0),
        (10, G::Q2K),
        (11, G::Q3K),
        (12, G::Q4K),
        (13, G::Q5K),
        (14, G::Q6K),
    ];
    match (number, BLOCKS.into_iter().find(|(known, _)| *known == number)) {
        (_, Some((_, dtype))) => Stored::Blocks(dtype),
        (0, _) => Stored::Plain(safetensors::Dtype::F32),
        (1, _) => Stored::Plain(safetensors::Dtype::F16),
        (28, _) => Stored::Plain(safetensors::Dtype::F64),
        (30, _) => Stored::Plain(safetensors::Dtype::BF16),
        _ => Stored::Unknown(number),
    }
}

impl Stored {
    /// Returns the bytes of so many numbers in rows of this length; `None` if rows are no whole blocks. Those of a type that cannot
    /// be read are unknown, and none.
    pub(crate) fn bytes(self, elements: usize, row: Option<usize>) -> Option<u64> {
        match self {
            Self::Plain(dtype) => (elements as u64).checked_mul(dtype.bitsize() as u64 / 8),
            Self::Blocks(dtype) => {
                let blocks = elements / dtype.block_size();
                let is_whole = row.unwrap_or(1).is_multiple_of(dtype.block_size());
                is_whole.then(|| (blocks as u64).checked_mul(dtype.type_size() as u64)).flatten()
            }
            Self::Bits(_) | Self::Unknown(_) => Some(0),
        }
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => write!(f, "{dtype:?}"),
            Self::Blocks(dtype) => f.write_str(&format!("{dtype:?}").to_lowercase().replace('k', "_k")),
            Self::Bits(name) => f.write_str(name),
            Self::Unknown(number) => write!(f, "GGML type {number}"),
        }
    }
}

/// The type of one tensor.
pub(crate) struct TensorType {
    pub(crate) dtype: GgufType,
    /// Whether no block of the wanted type divides its rows.
    pub(crate) is_wider: bool,
}

/// Types that can be asked for, by the names that llama.cpp has for them.
const NAMED: [(&str, GgufType); 6] = [
    ("f32", GgufType::F32),
    ("f16", GgufType::F16),
    ("bf16", GgufType::Bf16),
    ("q8_0", GgufType::Q8_0),
    ("q4_0", GgufType::Q4_0),
    ("q4_k", GgufType::Q4K),
];

impl FromStr for GgufType {
    type Err = &'static str;

    /// Reads the name of a type for a whole file.
    fn from_str(text: &str) -> std::result::Result<Self, &'static str> {
        let found = NAMED.iter().find(|(name, _)| *name == text);
        found.map(|(_, dtype)| *dtype).ok_or("give f32, f16, bf16, q8_0, q4_0 or q4_k")
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Stored::Blocks(self.ggml()).fmt(f)
    }
}

impl GgufType {
    /// Returns the type that a tensor in memory, and a folder, has; `None` if it is quantized.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::BF16),
            _ => None,
        }
    }

    fn ggml(self) -> GgmlDType {
        match self {
            Self::F32 => GgmlDType::F32,
            Self::F16 => GgmlDType::F16,
            Self::Bf16 => GgmlDType::BF16,
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q4K => GgmlDType::Q4K,
            Self::Q6K => GgmlDType::Q6K,
        }
    }

    /// The number of the type in a file.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q6K => 14,
            Self::Bf16 => 30,
        }
    }

    /// The number by which metadata says which type most tensors have (`general.file_type`).
    pub(crate) fn file_type(self) -> usize {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 7,
            Self::Q4K => 14,
            Self::Q6K => 18,
            Self::Bf16 => 32,
        }
    }

    /// Whether numbers are in blocks with common scales.
    pub(crate) fn is_quantized(self) -> bool {
        self.ggml().block_size() > 1
    }

    /// The bytes of so many numbers.
    pub(crate) fn bytes(self, count: usize) -> usize {
        count / self.ggml().block_size() * self.ggml().type_size()
    }

    /// The type of a tensor in a file whose matrices have this one, `is_tied` if the embedding is the head.
    pub(crate) fn of_tensor(self, name: &str, dims: &[usize], is_tied: bool) -> TensorType {
        if dims.len() < 2 {
            return TensorType { dtype: Self::F32, is_wider: false };
        }
        let head = if is_tied { "token_embd.weight" } else { "output.weight" };
        let wanted = match self {
            Self::Q4_0 | Self::Q4K if name == head => Self::Q6K,
            other => other,
        };
        let row = dims.last().copied().unwrap_or(1);
        let mut dtype = wanted;
        while !row.is_multiple_of(dtype.ggml().block_size()) {
            dtype = dtype.wider();
        }
        TensorType { dtype, is_wider: dtype != wanted }
    }

    /// The next type with smaller blocks, or none.
    fn wider(self) -> Self {
        match self {
            Self::Q4K => Self::Q4_0,
            Self::Q6K => Self::Q8_0,
            _ => Self::F16,
        }
    }

    /// Returns a tensor's bytes in the file; `path` is for the error about a number that the type, or the scale of its block, cannot hold.
    pub(crate) fn encode(self, name: &str, tensor: &Tensor, path: &Path) -> Result<Vec<u8>> {
        let tensor = tensor.contiguous()?;
        let quantized = QTensor::quantize(&tensor, self.ggml())?;
        let held = if self == Self::F32 { tensor.clone() } else { quantized.dequantize(tensor.device())? };
        if finite::first_not_finite(&tensor, &held)?.is_some() {
            // Of a block with a common scale, all are lost for the largest.
            if let Some((place, number)) = finite::largest(&tensor)? {
                let problem = finite::problem(name, tensor.dims(), place, number, &self.to_string());
                return Err(Error::Format { path: path.into(), problem });
            }
        }
        Ok(quantized.data()?.into_owned())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// The scale of a block is a number of f16, so that one large weight would make all of its block NaN.
    #[test]
    fn what_the_scale_of_a_block_cannot_hold_is_named() {
        let mut numbers = vec![0.25f32; 512];
        for dtype in [GgufType::F16, GgufType::Q8_0, GgufType::Q4_0, GgufType::Q4K, GgufType::Q6K] {
            let encode = |numbers: &[f32]| {
                let tensor = Tensor::new(numbers, &Device::Cpu).unwrap().reshape((2, 256)).unwrap();
                dtype.encode("a", &tensor, Path::new("m.gguf"))
            };
            numbers[300] = 1.0;
            assert_eq!(encode(&numbers).unwrap().len(), dtype.bytes(512));
            numbers[300] = -3e9;
            let said = encode(&numbers).unwrap_err().to_string();
            assert!(said.contains("a has -3000000000 at [1, 44], which"), "{dtype}: {said}");
        }
    }
}
