//! Elements of matrices: f32 and f64, whose sums have the same type, and f16 and bf16, whose sums are in f32.

use std::borrow::Cow;

use candle_core::WithDType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Matrix, ProductConfig, product_of_matrices, product_of_narrow};
use crate::Precision;
use crate::op::Real;
use crate::simd::vectorized;

/// An element of the operands of a product.
pub(crate) trait Element: WithDType {
    /// The type of sums of products.
    type Sum: Real;

    /// Returns the product in a new allocation; the configured precision is that of f32.
    ///
    /// # Errors
    /// Matrices that do not fit each other or their slices.
    fn product(
        pair: (Matrix<'_, Self>, Matrix<'_, Self>),
        how: ProductConfig,
    ) -> candle_core::Result<Vec<Self::Sum>>;

    fn widen(numbers: &[Self]) -> Cow<'_, [Self::Sum]>;

    fn narrow(sums: Vec<Self::Sum>) -> Vec<Self>;
}

/// An element of 16 bits.
pub(crate) trait Narrow: WithDType + Source {
    /// A precision of f32 products that keeps all digits of such elements.
    const PRECISION: Precision;

    fn widen_into(from: &[Self], to: &mut [f32]);

    /// Rounds to nearest, ties to even.
    fn narrow_into(from: &[f32], to: &mut [Self]);
}

#[cfg(target_arch = "x86_64")]
pub(crate) use super::bf16::Source;

/// What a processor's unit for bf16 packs: there is no such unit here.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) trait Source: Copy {}

#[cfg(not(target_arch = "x86_64"))]
impl<T: Copy> Source for T {}

impl Narrow for bf16 {
    const PRECISION: Precision = Precision::Bf16;

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

    fn widen_into(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow_into(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

macro_rules! elements {
    (wide: $($wide:ty),*; narrow: $($narrow:ty),*) => {
        $(impl Element for $wide {
            type Sum = Self;

            fn product(
                pair: (Matrix<'_, Self>, Matrix<'_, Self>),
                how: ProductConfig,
            ) -> candle_core::Result<Vec<Self>> {
                product_of_matrices(pair, how)
            }

            fn widen(numbers: &[Self]) -> Cow<'_, [Self]> {
                numbers.into()
            }

            fn narrow(sums: Vec<Self>) -> Vec<Self> {
                sums
            }
        })*
        $(impl Element for $narrow {
            type Sum = f32;

            fn product(
                pair: (Matrix<'_, Self>, Matrix<'_, Self>),
                how: ProductConfig,
            ) -> candle_core::Result<Vec<f32>> {
                product_of_narrow(pair, how.in_parallel)
            }

            fn widen(numbers: &[Self]) -> Cow<'_, [f32]> {
                let mut wide = vec![0.0; numbers.len()];
                Self::widen_into(numbers, &mut wide);
                wide.into()
            }

            fn narrow(sums: Vec<f32>) -> Vec<Self> {
                let mut narrow = vec![Self::default(); sums.len()];
                Self::narrow_into(&sums, &mut narrow);
                narrow
            }
        })*
    };
}

elements!(wide: f32, f64; narrow: f16, bf16);
