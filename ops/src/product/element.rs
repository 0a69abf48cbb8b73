//! Elements of matrices: f32 and f64, whose sums have the same type, and f16 and bf16, whose sums are in f32.

use std::borrow::Cow;
use std::mem::MaybeUninit;

use candle_core::WithDType;
use half::{bf16, f16};

use super::narrow_product::product_of_narrow;
use super::{Matrix, Narrow, ProductConfig, multiply_rounded, product_of_matrices};
use crate::real::Real;

/// An element of the operands of a product.
pub(crate) trait Element: WithDType {
    /// The type of its sums of products.
    type Sum: Accumulator;

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

/// The type of sums of products: f32 or f64.
pub(crate) trait Accumulator: Real {
    /// Computes a product in a precision other than that of its elements; returns false if there is no such product.
    ///
    /// # Safety
    /// As [`multiply_rounded`].
    #[allow(unsafe_code)]
    unsafe fn multiply_rounded(
        _: &mut [MaybeUninit<Self>],
        _: (Matrix<'_, Self>, Matrix<'_, Self>),
        _scale: Self,
        _add: bool,
        _: ProductConfig,
    ) -> bool {
        false
    }
}

impl Accumulator for f64 {}

impl Accumulator for f32 {
    #[allow(unsafe_code)]
    unsafe fn multiply_rounded(
        out: &mut [MaybeUninit<Self>],
        pair: (Matrix<'_, Self>, Matrix<'_, Self>),
        scale: Self,
        add: bool,
        how: ProductConfig,
    ) -> bool {
        // SAFETY: the caller upholds the same contract.
        unsafe { multiply_rounded(out, pair, scale, add, how) }
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
