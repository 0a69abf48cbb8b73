//! How a product is computed: precision and threads, and the words for it.

use candle_core::DType;
use half::{bf16, f16};

use super::{Narrow, Unit, unit};
use crate::Precision;

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ProductConfig {
    /// Precision of f32 products; f64 is computed in f64.
    pub(crate) precision: Precision,
    /// Whether all threads of the pool take part. The bits are the same: threads divide the result, not its sums.
    pub(crate) in_parallel: bool,
}

impl ProductConfig {
    /// This thread's precision, on one thread.
    pub(crate) fn current() -> Self {
        Self { precision: Precision::current(), in_parallel: false }
    }

    /// The same for tensors of a dtype that are computed in f32: of 16 bits, in a precision that keeps all their
    /// digits.
    pub(crate) fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self { precision: bf16::PRECISION, in_parallel: false },
            DType::F16 => Self { precision: f16::PRECISION, in_parallel: false },
            _ => Self::current(),
        }
    }

    /// The same, on all threads.
    pub(crate) fn in_parallel(self) -> Self {
        Self { in_parallel: rayon::current_num_threads() > 1, ..self }
    }
}

impl Precision {
    /// Describes, for people, how this machine computes such products.
    ///
    /// ```
    /// assert_eq!(ops::Precision::F32.products(), "in f32");
    /// ```
    pub fn products(self) -> &'static str {
        match (self, unit()) {
            (Self::F32, _) => "in f32",
            (Self::F32High, Ok(Unit::Amx)) => "as three of bf16, by the matrix unit (AMX)",
            (Self::F32High, Err(why)) if why.contains("refuses") => {
                "in f32: the system refuses the state of the matrix unit (AMX)"
            }
            (Self::F32High, _) => "in f32: this processor has no matrix unit (AMX)",
            (Self::Bf16, Ok(Unit::Amx)) => "in bf16, by the matrix unit (AMX)",
            (Self::Bf16, Ok(Unit::Dot)) => "in bf16, by dot products of AVX-512",
            (Self::Bf16, Err(why)) => why,
        }
    }

    /// Whether this machine computes such products in f32, of copies of both matrices that are rounded.
    pub fn rounds_copies(self) -> bool {
        self == Self::Bf16 && unit().is_err()
    }
}
