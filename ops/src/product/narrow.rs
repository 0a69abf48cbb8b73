//! Elements of 16 bits, f16 and bf16: to f32 and back.

use candle_core::WithDType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::Matrix;
#[cfg(target_arch = "x86_64")]
pub(crate) use super::bf16::Source;
use crate::Precision;
use crate::simd::vectorized;

/// An element of 16 bits.
pub trait Narrow: WithDType + Source {
    /// A precision of f32 products that keeps all digits of such elements.
    const PRECISION: Precision;

    /// To f32, which holds each of them.
    fn widen_into(from: &[Self], to: &mut [f32]);

    /// Rounds to nearest, ties to even.
    fn narrow_into(from: &[f32], to: &mut [Self]);
}

/// What a processor's unit for bf16 packs: there is no such unit here.
#[cfg(not(target_arch = "x86_64"))]
pub trait Source: Copy {}

#[cfg(not(target_arch = "x86_64"))]
impl<T: Copy> Source for T {}

impl Narrow for bf16 {
    const PRECISION: Precision = Precision::Bf16;

    /// To f32, which holds each of them.
    fn widen_into(from: &[Self], to: &mut [f32]) {
        let wide = |&x: &Self| f32::from_bits(u32::from(x.to_bits()) << 16);
        vectorized!({ to.iter_mut().zip(from).for_each(|(to, from)| *to = wide(from)) });
    }

    fn narrow_into(from: &[f32], to: &mut [Self]) {
        let narrow = |x: f32| {
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
            // A quiet NaN, whatever its lower bits were.
            Self::from_bits(if x.is_nan() { (bits >> 16 | 0x40) as u16 } else { (rounded >> 16) as u16 })
        };
        vectorized!({ to.iter_mut().zip(from).for_each(|(to, &from)| *to = narrow(from)) });
    }
}

impl Narrow for f16 {
    const PRECISION: Precision = Precision::F32High;

    /// To f32, which holds each of them.
    fn widen_into(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow_into(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl<T: Narrow> Matrix<'_, T> {
    /// The matrix in f32, in the same memory order. Its rows or its columns are adjacent elements.
    pub(super) fn widened_into(self, out: &mut Vec<f32>) -> Matrix<'_, f32> {
        if self.column_stride != 1 {
            return self.t().widened_into(out).t();
        }
        out.resize(self.rows * self.columns, 0.0);
        for (row, out) in out.chunks_exact_mut(self.columns.max(1)).enumerate() {
            T::widen_into(self.row(row), out);
        }
        Matrix::new(out, self.rows, self.columns, self.columns)
    }
}
