//! Products of matrices that lie in slices: the one place that calls `gemm`.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod bf16;
mod tensors;

use std::mem::MaybeUninit;
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

    /// True if every element lies in the slice, in a place of its own.
    fn is_whole(&self) -> bool {
        let Some((row, column)) = self.rows.checked_sub(1).zip(self.columns.checked_sub(1)) else {
            return true;
        };
        if (row > 0 && self.row_stride == 0) || (column > 0 && self.column_stride == 0) {
            return false;
        }
        let last = row.checked_mul(self.row_stride).zip(column.checked_mul(self.column_stride));
        last.and_then(|(row, column)| row.checked_add(column)).is_some_and(|last| last < self.data.len())
    }
}

/// Rounded to the nearest bf16, to even where two are as near. Arithmetic alone, for vectors; not-a-numbers stay what they are.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    if x.is_nan() { x } else { f32::from_bits(up) }
}

impl Matrix<'_, f32> {
    /// The matrix with its numbers, times `scale`, rounded to bf16, dense in the order that it has.
    fn rounded_into(self, scale: f32, out: &mut Vec<f32>) -> Matrix<'_, f32> {
        if self.column_stride > self.row_stride {
            return self.t().rounded_into(scale, out).t();
        }
        out.clear();
        out.reserve(self.rows * self.columns);
        for row in 0..self.rows {
            let numbers = self.data.get(row * self.row_stride..).unwrap_or_default();
            match numbers.get(..self.columns).filter(|_| self.column_stride == 1) {
                Some(numbers) => vectorized!({ out.extend(numbers.iter().map(|&x| rounded(x * scale))) }),
                None => {
                    let numbers = numbers.iter().step_by(self.column_stride.max(1)).take(self.columns);
                    out.extend(numbers.map(|&x| rounded(x * scale)));
                }
            }
        }
        Matrix::new(out, self.rows, self.columns, self.columns)
    }
}

/// What multiplies bf16 faster than this processor multiplies f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no other processor's unit is used"))]
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
    if how.precision != Precision::F32 && m.min(n).min(k) > 0 {
        // SAFETY: `out` is initialized, and stays so.
        let numbers = unsafe { &mut *(std::ptr::from_mut(out) as *mut [MaybeUninit<T>]) };
        // SAFETY: the same.
        if unsafe { T::multiply_rounded(numbers, pair, scale, add, how) } {
            return Ok(());
        }
    }
    multiply_exactly(out, pair, scale, add, how.in_parallel);
    Ok(())
}

/// The product in a new allocation.
///
/// # Errors
/// As [`multiply`].
pub(crate) fn product_of_matrices<T: Real>(
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    how: How,
) -> candle_core::Result<Vec<T>> {
    let (a, b) = &pair;
    let len = a.rows * b.columns;
    let fits = a.columns == b.rows && a.columns > 0 && a.is_whole() && b.is_whole();
    if how.precision != Precision::F32 && fits && len > 0 {
        let mut out = Vec::with_capacity(len);
        // SAFETY: nothing is added to `out`.
        if unsafe { T::multiply_rounded(&mut out.spare_capacity_mut()[..len], pair, T::one(), false, how) } {
            // SAFETY: all of the product was written.
            unsafe { out.set_len(len) };
            return Ok(out);
        }
    }
    let mut out = Vec::with_capacity(len);
    if !fits || len == 0 {
        out.resize(len, T::zero());
        multiply(&mut out, pair, T::one(), false, how)?;
        return Ok(out);
    }
    // SAFETY: the matrices are whole and fit each other and the room; nothing is added to it.
    unsafe { by_gemm(&mut out.spare_capacity_mut()[..len], pair, T::one(), false, how.in_parallel) };
    // SAFETY: all of the product was written.
    unsafe { out.set_len(len) };
    Ok(out)
}

/// [`multiply`] in another precision than f32, where that is another product: then all of `out` is written.
///
/// # Safety
/// The matrices fit each other, their slices and `out`, and have numbers. Where it adds, `out` is initialized.
pub(crate) unsafe fn multiply_rounded(
    out: &mut [MaybeUninit<f32>],
    pair: (Matrix<'_, f32>, Matrix<'_, f32>),
    scale: f32,
    add: bool,
    How { precision, in_parallel }: How,
) -> bool {
    match (precision, unit()) {
        #[cfg(target_arch = "x86_64")]
        (Precision::Bf16, Ok(unit)) => {
            let plan = bf16::Plan { unit, digits: bf16::Digits::Eight, in_parallel };
            // SAFETY: the caller answers for all.
            unsafe { plan.multiply(out, pair, scale, add) };
        }
        #[cfg(target_arch = "x86_64")]
        (Precision::F32High, Ok(unit @ Unit::Amx)) => {
            let plan = bf16::Plan { unit, digits: bf16::Digits::Sixteen, in_parallel };
            // SAFETY: the caller answers for all.
            unsafe { plan.multiply(out, pair, scale, add) };
        }
        (Precision::Bf16, _) => {
            let (mut left, mut right) = (Vec::new(), Vec::new());
            let pair = (pair.0.rounded_into(scale, &mut left), pair.1.rounded_into(1.0, &mut right));
            if !add {
                out.fill(MaybeUninit::new(0.0));
            }
            // SAFETY: it is initialized, now at the latest.
            let out = unsafe { &mut *(std::ptr::from_mut(out) as *mut [f32]) };
            multiply_exactly(out, pair, 1.0, add, in_parallel);
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
    // SAFETY: `out` is initialized, and stays so.
    let numbers = unsafe { &mut *(std::ptr::from_mut(out) as *mut [MaybeUninit<T>]) };
    // SAFETY: the callers have seen that all fit.
    unsafe { by_gemm(numbers, (a, b), scale, add, in_parallel) };
}

/// The same without plain loops, also of small ones: candle's bits.
///
/// # Safety
/// The matrices are whole and fit each other and `out`. Where it adds, `out` is initialized; else all of it is written.
unsafe fn by_gemm<T: Real>(
    out: &mut [MaybeUninit<T>],
    (a, b): (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
    in_parallel: bool,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let parallelism = match in_parallel {
        true => Parallelism::Rayon(rayon::current_num_threads()),
        false => Parallelism::None,
    };
    let stride = |stride: usize| stride as isize;
    // SAFETY: `a` (m x k) and `b` (k x n) lie wholly in their slices by `is_whole`, `out` has m * n numbers in rows of n, and
    // is borrowed mutably, so that it overlaps neither; it is not read unless it is added to. T is f32 or f64, which `gemm` has
    // kernels for.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr().cast::<T>(),
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
                    .zip(from.iter().step_by(b.column_stride.max(1)))
                    .for_each(|(to, &x)| *to += factor * x);
            }
        }
    }
}

#[cfg(test)]
mod tests;
