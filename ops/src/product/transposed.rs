//! Products of few rows and a matrix whose columns are adjacent in memory, as a linear layer's weight times a small batch.
//!
//! `gemm` first copies that matrix into the order in which it reads it, unless the rows of the result are the adjacent ones. For
//! few rows the copy takes longer than the multiplication, so the result is computed transposed, and then turned. The sums
//! are the same, to the bit.

use std::mem::MaybeUninit;

use super::{Matrix, call_gemm};
use crate::real::Real;

/// With 2 to this many rows it is always faster; for a single one `gemm` copies nothing.
const FEW: usize = 32;

/// At most this many rows.
const MOST: usize = 128;

/// With more than [`FEW`] rows, turning the result must be little work beside the copy: sums of at least this many elements for
/// each row.
const DEPTH_PER_ROW: usize = 16;

/// Rows that are turned at the same time: one cache line of f32.
const TURNED: usize = 16;

/// Whether the product is computed here.
pub(super) fn is_faster<T>(a: &Matrix<'_, T>, b: &Matrix<'_, T>) -> bool {
    let is_deep = a.rows <= MOST && a.rows * DEPTH_PER_ROW <= a.columns;
    a.rows > 1 && (a.rows <= FEW || is_deep) && b.row_stride == 1 && b.column_stride > 1
}

/// Writes `scale * a b` to all of `out`, in dense rows.
///
/// # Safety
/// The matrices lie in their slices and fit each other and `out`.
pub(super) unsafe fn by_gemm<T: Real>(
    out: &mut [MaybeUninit<T>],
    (a, b): (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    in_parallel: bool,
) {
    let (rows, columns) = (a.rows, b.columns);
    let mut numbers = Vec::with_capacity(rows * columns);
    // SAFETY: there are `columns` lines of `rows` elements; nothing is added to them.
    unsafe { call_gemm(numbers.spare_capacity_mut(), [1, rows], (a, b), scale, false, in_parallel) };
    // SAFETY: all of the product was written.
    unsafe { numbers.set_len(rows * columns) };
    for (first, out) in (0..rows).step_by(TURNED).zip(out.chunks_mut(TURNED * columns)) {
        for (column, line) in numbers.chunks_exact(rows).enumerate() {
            for (x, row) in line[first..].iter().zip(out.chunks_exact_mut(columns)) {
                row[column].write(*x);
            }
        }
    }
}
