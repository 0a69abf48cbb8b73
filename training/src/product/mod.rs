//! Products of matrices that lie in slices: the one place that calls `gemm`.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod bf16;
mod tensors;

use std::ops::Range;

use candle_core::bail;
use gemm::Parallelism;

pub(crate) use self::tensors::{product, product_of};

use crate::Precision;
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

    /// The matrix with its numbers rounded to bf16, dense in the order that it has.
    fn rounded_into(self, out: &mut Vec<T>) -> Matrix<'_, T>
    where
        T: Real,
    {
        if self.column_stride > self.row_stride {
            return self.t().rounded_into(out).t();
        }
        out.clear();
        for row in 0..self.rows {
            let numbers = self.data.get(row * self.row_stride..).unwrap_or_default();
            let numbers = numbers.iter().step_by(self.column_stride.max(1)).take(self.columns);
            out.extend(numbers.map(|x| T::from_f64(half::bf16::from_f64(x.to_f64()).to_f64())));
        }
        Matrix::new(out, self.rows, self.columns, self.columns)
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

/// What multiplies bf16 faster than this processor multiplies f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// The matrix unit of Intel's processors.
    Amx,
    /// Dot products of pairs, of AMD's.
    Dot,
}

/// The fastest unit for products of bf16; or, where there is none, how they are computed.
pub(crate) fn unit() -> Result<Unit, &'static str> {
    #[cfg(target_arch = "x86_64")]
    return bf16::unit();
    #[cfg(not(target_arch = "x86_64"))]
    Err("in f32, of rounded numbers: there is no faster way on this processor")
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct How {
    /// Of f32; f64 is computed in f64.
    pub(crate) precision: Precision,
    /// By all threads of the pool, with the same bits: they share out the result, not its sums.
    pub(crate) in_parallel: bool,
}

impl How {
    /// In this thread's precision, by one thread.
    pub(crate) fn current() -> Self {
        Self { precision: Precision::current(), in_parallel: false }
    }

    /// The same by all threads.
    pub(crate) fn in_parallel(self) -> Self {
        Self { in_parallel: rayon::current_num_threads() > 1, ..self }
    }
}

/// Writes `scale * a b` into dense rows, or adds it to what they hold.
///
/// The result has the same bits whatever runs beside it: the kernel is picked by the processor and the sizes.
///
/// # Errors
/// Matrices that do not fit each other or their slices.
pub(crate) fn multiply<T: Real>(
    out: &mut [T],
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
    how: How,
) -> candle_core::Result<()> {
    let (a, b) = &pair;
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if b.rows != k || m.checked_mul(n) != Some(out.len()) || !a.is_whole() || !b.is_whole() {
        bail!("a product of {m} x {k} and {} x {n} numbers into {}: they do not fit", b.rows, out.len());
    }
    if how.precision != Precision::F32
        && m.min(n).min(k) > 0
        && T::multiply_rounded(out, pair, scale, add, how)
    {
        return Ok(());
    }
    multiply_exactly(out, pair, scale, add, how.in_parallel);
    Ok(())
}

/// [`multiply`] in another precision than f32, where that is another product and the matrices are large enough.
pub(crate) fn multiply_rounded(
    out: &mut [f32],
    pair: (Matrix<'_, f32>, Matrix<'_, f32>),
    scale: f32,
    add: bool,
    How { precision, in_parallel }: How,
) -> bool {
    match (precision, unit()) {
        #[cfg(target_arch = "x86_64")]
        (Precision::Bf16, Ok(unit)) => {
            bf16::Plan { unit, digits: bf16::Digits::Eight, in_parallel }.multiply(out, pair, scale, add);
        }
        #[cfg(target_arch = "x86_64")]
        (Precision::F32High, Ok(unit @ Unit::Amx)) => {
            bf16::Plan { unit, digits: bf16::Digits::Sixteen, in_parallel }.multiply(out, pair, scale, add);
        }
        (Precision::Bf16, _) => {
            let (mut left, mut right) = (Vec::new(), Vec::new());
            let pair = (pair.0.rounded_into(&mut left), pair.1.rounded_into(&mut right));
            multiply_exactly(out, pair, scale, add, in_parallel);
        }
        _ => return false,
    }
    true
}

/// The product of matrices that fit.
fn multiply_exactly<T: Real>(
    out: &mut [T],
    (a, b): (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
    in_parallel: bool,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if m.saturating_mul(n).saturating_mul(k) <= SMALL {
        vectorized!({ plain(out, a, b, scale, add) });
        return;
    }
    let parallelism = match in_parallel {
        true => Parallelism::Rayon(rayon::current_num_threads()),
        false => Parallelism::None,
    };
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
                multiply(&mut out, (a, b), 0.5, add, How::default())?;
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

    /// Rounded numbers by every unit that there is, and without one, equal the definition, for all shapes, orders and edges.
    #[test]
    fn products_of_rounded_numbers() -> candle_core::Result<()> {
        let round = |x: f32| half::bf16::from_f32(x).to_f32();
        for (m, n, k) in
            [(1, 1, 1), (3, 5, 2), (32, 32, 32), (33, 47, 31), (64, 130, 515), (17, 1030, 64), (1, 40, 700)]
        {
            for (by_columns, pad, add, scale) in
                [(false, 0, false, 1.0), (true, 0, true, 0.5), (false, 3, true, 2.0), (true, 5, false, 1.0)]
            {
                let number = |i: usize| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
                let numbers: Vec<f32> = (0..(m + n + pad) * (k + pad) + k * n + 9).map(number).collect();
                let a = match add {
                    true => Matrix::new(&numbers, k, m, m + pad).t(),
                    false => Matrix::new(&numbers, m, k, k + pad),
                };
                let b = match by_columns {
                    true => Matrix::new(&numbers[1..], n, k, k + pad).t(),
                    false => Matrix::new(&numbers[1..], k, n, n + pad),
                };
                let at =
                    |x: Matrix<'_, f32>, i: usize, j: usize| x.data[i * x.row_stride + j * x.column_stride];
                let product = |i: usize, j: usize, digits: fn(f32) -> f32| -> f32 {
                    (0..k)
                        .map(|l| f64::from(digits(at(a, i, l))) * f64::from(digits(at(b, l, j))))
                        .sum::<f64>() as f32
                };
                let first = f32::from(u8::from(add));
                let expected =
                    |digits| (0..m * n).map(move |at| product(at / n, at % n, digits) * scale + first);
                let mut out = vec![1f32; m * n];
                let how = How { precision: Precision::Bf16, in_parallel: false };
                let check = |out: &[f32], digits, most: f32, what: &str| {
                    for (index, (found, expected)) in out.iter().zip(expected(digits)).enumerate() {
                        let gap = (found - expected).abs() / (k as f32).sqrt();
                        assert!(
                            gap < most,
                            "{what} {m} {n} {k} {by_columns} {pad} at {index}: {found}, {expected}"
                        );
                    }
                };
                multiply(&mut out, (a, b), scale, add, how)?;
                check(&out, round, 3e-6, "this machine's way");
                let (mut left, mut right) = (Vec::new(), Vec::new());
                let rounded = (a.rounded_into(&mut left), b.rounded_into(&mut right));
                out.fill(1.0);
                multiply_exactly(&mut out, rounded, scale, add, false);
                check(&out, round, 3e-6, "without a unit");
                #[cfg(target_arch = "x86_64")]
                for unit in bf16::available() {
                    for (digits, rounding, most) in [
                        (bf16::Digits::Eight, round as fn(f32) -> f32, 3e-6),
                        (bf16::Digits::Sixteen, |x| x, 1e-5),
                    ] {
                        let mut parallel = vec![1f32; m * n];
                        out.fill(1.0);
                        let plan = bf16::Plan { unit, digits, in_parallel: false };
                        plan.multiply(&mut out, (a, b), scale, add);
                        check(&out, rounding, most, "a unit");
                        bf16::Plan { in_parallel: true, ..plan }.multiply(&mut parallel, (a, b), scale, add);
                        assert_eq!(out, parallel, "by several threads");
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let numbers = [0f32; 12];
        let whole = Matrix::new(&numbers, 3, 4, 4);
        let line =
            |out: usize, a, b| multiply(&mut vec![0f32; out], (a, b), 1.0, false, How::default()).is_err();
        assert!(!line(9, whole, whole.t()));
        assert!(line(8, whole, whole.t()));
        assert!(line(12, whole, whole));
        assert!(line(9, whole.rows(1..4), whole.t()));
        assert!(line(9, Matrix::new(&numbers, 3, 4, 5), whole.t()));
        assert!(line(9, Matrix::new(&numbers, 3, 4, usize::MAX), whole.t()));
    }
}
