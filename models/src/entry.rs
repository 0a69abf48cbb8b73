//! Where a file has a tensor.

use candle_core::DType;

use crate::gguf_file::Stored;

/// Position, dtype and shape of a tensor in a file.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) file: usize,
    pub(crate) begin: u64,
    pub(crate) bytes: u64,
    pub(crate) stored: Stored,
    pub(crate) dims: Vec<usize>,
    /// Number of heads whose rows are in another order in the file, see [`Rows`](crate::gguf_file::Rows).
    pub(crate) rotated_heads: Option<usize>,
}

impl Entry {
    /// Returns candle's dtype; `None` if it is not a float type.
    pub(crate) fn dtype(&self) -> Option<DType> {
        let Stored::Plain(dtype) = self.stored else { return None };
        let dtype = DType::try_from(dtype).ok()?;
        matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64).then_some(dtype)
    }

    /// Whether its numbers can be read.
    pub(crate) fn is_readable(&self) -> bool {
        self.dtype().is_some() || self.is_quantized()
    }

    /// Whether several of its numbers have a common scale.
    pub(crate) fn is_quantized(&self) -> bool {
        matches!(self.stored, Stored::Blocks(_) | Stored::Bits(_))
    }

    /// Returns the bytes of its elements.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn dtype_name(&self) -> String {
        self.stored.to_string()
    }
}
