//! Products of matrices that lie in slices: the one place that calls `gemm`.
#![allow(unsafe_code)]

use std::ops::Range;

use candle_core::bail;
use gemm::Parallelism;

use crate::op::Real;
use crate::vectors::vectorized;

/// Below this many multiplications plain loops are quicker than packing for `gemm`.
const SMALL: usize = 4096;

/// A matrix in a slice; neighbours in a row or in a column may lie apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Dense rows of `columns` numbers, of which each begins `row_stride` numbers after the one before.
    pub(crate) fn new(data: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// Some of its rows.
    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        let data = self.data.get(rows.start * self.row_stride..).unwrap_or_default();
        Self { data, rows: rows.len(), ..self }
    }

    /// Some of its columns.
    pub(crate) fn columns(self, columns: Range<usize>) -> Self {
        let data = self.data.get(columns.start * self.column_stride..).unwrap_or_default();
        Self { data, columns: columns.len(), ..self }
    }

    /// One of its rows, where they are dense.
    pub(crate) fn row(self, at: usize) -> &'a [T] {
        self.data.get(at * self.row_stride..).and_then(|row| row.get(..self.columns)).unwrap_or_default()
    }

    /// The transposed matrix.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Writes it by columns: the transposed matrix in dense rows.
    pub(crate) fn transpose_into(self, out: &mut Vec<T>)
    where
        T: Real,
    {
        out.clear();
        out.reserve(self.rows * self.columns);
        for column in 0..self.columns {
            let numbers = self.data.get(column * self.column_stride..).unwrap_or_default();
            out.extend(numbers.iter().step_by(self.row_stride.max(1)).take(self.rows));
        }
    }

    /// True if every element lies in the slice.
    fn is_whole(&self) -> bool {
        let Some((row, column)) = self.rows.checked_sub(1).zip(self.columns.checked_sub(1)) else {
            return true;
        };
        let last = row.checked_mul(self.row_stride).zip(column.checked_mul(self.column_stride));
        last.and_then(|(row, column)| row.checked_add(column)).is_some_and(|last| last < self.data.len())
    }
}

/// Writes `scale * a b` into dense rows, or adds it to what they hold.
///
/// The result has the same bits whatever runs beside it: one thread computes it, and so does `gemm`, which picks its kernel by
/// the processor and the sizes.
///
/// # Errors
/// Matrices that do not fit each other or their slices.
pub(crate) fn multiply<T: Real>(
    out: &mut [T],
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
) -> candle_core::Result<()> {
    multiply_by(out, pair, scale, add, Parallelism::None)
}

/// The same by several threads, with the same bits: they share out the result, not its sums.
///
/// # Errors
/// As [`multiply`].
pub(crate) fn multiply_in_parallel<T: Real>(
    out: &mut [T],
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
) -> candle_core::Result<()> {
    let parallelism = match rayon::current_num_threads() {
        1 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    };
    multiply_by(out, pair, scale, add, parallelism)
}

fn multiply_by<T: Real>(
    out: &mut [T],
    (a, b): (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
    parallelism: Parallelism,
) -> candle_core::Result<()> {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if b.rows != k || m.checked_mul(n) != Some(out.len()) || !a.is_whole() || !b.is_whole() {
        bail!("a product of {m} x {k} and {} x {n} numbers into {}: they do not fit", b.rows, out.len());
    }
    if m.saturating_mul(n).saturating_mul(k) <= SMALL {
        vectorized!({ plain(out, a, b, scale, add) });
        return Ok(());
    }
    let stride = |stride: usize| stride as isize;
    // SAFETY: `a` (m x k) and `b` (k x n) lie wholly in their slices by `is_whole`, `out` has m * n numbers in rows of n, and
    // is borrowed mutably, so that it overlaps neither. T is f32 or f64, which `gemm` has kernels for.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(n),
            add,
            a.data.as_ptr(),
            stride(a.column_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.column_stride),
            stride(b.row_stride),
            T::one(),
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
    Ok(())
}

#[inline(always)]
fn plain<T: Real>(out: &mut [T], a: Matrix<'_, T>, b: Matrix<'_, T>, scale: T, add: bool) {
    if !add {
        out.fill(T::zero());
    }
    for (i, row) in out.chunks_exact_mut(b.columns.max(1)).enumerate() {
        for k in 0..a.columns {
            let factor = a.data[i * a.row_stride + k * a.column_stride] * scale;
            let from = &b.data[k * b.row_stride..];
            if b.column_stride == 1 {
                row.iter_mut().zip(from).for_each(|(to, &x)| *to += factor * x);
            } else {
                row.iter_mut()
                    .zip(from.iter().step_by(b.column_stride))
                    .for_each(|(to, &x)| *to += factor * x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small and large products, dense, strided and transposed, written and added, equal the definition.
    #[test]
    fn products_are_sums_of_products() -> candle_core::Result<()> {
        for (m, n, k) in [(1, 1, 1), (3, 5, 2), (16, 16, 16), (17, 33, 19), (64, 130, 48), (2, 3, 0)] {
            for (by_columns, pad, add) in
                [(false, 0, false), (true, 0, true), (false, 3, true), (true, 5, false)]
            {
                let number = |i: usize| ((i * 7919) % 31) as f64 - 15.0;
                let numbers: Vec<f64> = (0..(m + n + k + pad) * (m + n + k + pad)).map(number).collect();
                let a = Matrix::new(&numbers, m, k, k + pad);
                let b = match by_columns {
                    true => Matrix::new(&numbers[1..], n, k, k + pad).t(),
                    false => Matrix::new(&numbers[1..], k, n, n + pad),
                };
                let mut out = vec![1.0; m * n];
                multiply(&mut out, (a, b), 0.5, add)?;
                for (index, &found) in out.iter().enumerate() {
                    let (i, j) = (index / n, index % n);
                    let other =
                        |l: usize| if by_columns { 1 + j * (k + pad) + l } else { 1 + l * (n + pad) + j };
                    let sum: f64 = (0..k).map(|l| numbers[i * (k + pad) + l] * numbers[other(l)]).sum();
                    assert_eq!(found, 0.5 * sum + f64::from(u8::from(add)), "{m} {n} {k} {by_columns} {pad}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let numbers = [0f32; 12];
        let whole = Matrix::new(&numbers, 3, 4, 4);
        let line = |out: usize, a, b| multiply(&mut vec![0f32; out], (a, b), 1.0, false).is_err();
        assert!(!line(9, whole, whole.t()));
        assert!(line(8, whole, whole.t()));
        assert!(line(12, whole, whole));
        assert!(line(9, whole.rows(1..4), whole.t()));
        assert!(line(9, Matrix::new(&numbers, 3, 4, 5), whole.t()));
        assert!(line(9, Matrix::new(&numbers, 3, 4, usize::MAX), whole.t()));
    }
}
