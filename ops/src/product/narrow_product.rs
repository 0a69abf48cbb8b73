//! Products of matrices of 16 bits, with sums in f32.
#![allow(unsafe_code)]

use candle_core::bail;

use super::few_rows::{FEW, few_rows};
use super::{Matrix, Narrow, ProductConfig, multiply_by_unit, product_of_matrices};
use crate::Precision;

/// Returns the product of matrices of 16 bits, with sums in f32, in a new allocation.
///
/// # Errors
/// As [`multiply`]; an operand of which neither rows nor columns are adjacent elements.
pub(super) fn product_of_narrow<T: Narrow>(
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    in_parallel: bool,
) -> candle_core::Result<Vec<f32>> {
    let (a, b) = &pair;
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let is_dense = |x: &Matrix<'_, T>| x.row_stride == 1 || x.column_stride == 1;
    if b.rows != k || !a.fits_slice() || !b.fits_slice() || !is_dense(a) || !is_dense(b) {
        bail!("a product of {m} x {k} and {} x {n} numbers of 16 bits: they do not fit", b.rows);
    }
    let len = m * n;
    if len == 0 || k == 0 {
        return Ok(vec![0.0; len]);
    }
    if m <= FEW && a.column_stride == 1 && b.row_stride == 1 {
        return Ok(few_rows(*a, b.t()));
    }
    let mut out = Vec::with_capacity(len);
    let how = ProductConfig { precision: T::PRECISION, in_parallel };
    // SAFETY: the matrices fit; nothing is added to `out`.
    if unsafe { multiply_by_unit(&mut out.spare_capacity_mut()[..len], pair, 1.0, false, how) } {
        // SAFETY: all of the product was written.
        unsafe { out.set_len(len) };
        return Ok(out);
    }
    product_of_widened(pair, in_parallel)
}

/// Does the same with copies of the operands in f32.
pub(super) fn product_of_widened<T: Narrow>(
    (a, b): (Matrix<'_, T>, Matrix<'_, T>),
    in_parallel: bool,
) -> candle_core::Result<Vec<f32>> {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let pair = (a.widened_into(&mut left), b.widened_into(&mut right));
    product_of_matrices(pair, ProductConfig { precision: Precision::F32, in_parallel })
}
