//! The dtypes that operations compute in.

use candle_core::DType;

use crate::{Error, Result};

/// The dtype in which numbers of this one are computed with where 16 bits would not do: f32 for f16 and bf16, and itself for any other.
///
/// ```
/// use candle_core::DType;
///
/// assert_eq!([DType::BF16, DType::F64].map(ops::wide_dtype), [DType::F32, DType::F64]);
/// ```
pub fn wide_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

/// The dtype that an operation computes in, for an input dtype.
pub(crate) fn working_dtype(operation: &'static str, dtype: DType) -> Result<DType> {
    match wide_dtype(dtype) {
        wide @ (DType::F32 | DType::F64) => Ok(wide),
        got => Err(Error::UnsupportedDtype { operation, got }),
    }
}
