//! Matrix products of slices: the only module that calls `gemm`.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod bf16;
mod config;
mod element;
mod few_rows;
mod narrow;
mod narrow_product;
mod tensors;
mod transposed;

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::bail;
use gemm::Parallelism;

pub(crate) use self::config::ProductConfig;
pub(crate) use self::element::{Accumulator, Element};
pub use self::narrow::Narrow;
pub(crate) use self::tensors::{product, product_of};

use self::narrow::Source;
use crate::Precision;
use crate::real::Real;
use crate::simd::vectorized;

/// Up to this many multiplications, plain loops are faster than packing for `gemm`.
const SMALL: usize = 4096;

/// A matrix in a slice, with any strides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// A matrix of rows of `columns` adjacent elements; consecutive rows begin `row_stride` elements apart.
    pub(crate) fn new(data: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// A range of its rows.
    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        let data = self.data.get(rows.start * self.row_stride..).unwrap_or_default();
        Self { data, rows: rows.len(), ..self }
    }

    /// A range of its columns.
    pub(crate) fn columns(self, columns: Range<usize>) -> Self {
        let data = self.data.get(columns.start * self.column_stride..).unwrap_or_default();
        Self { data, columns: columns.len(), ..self }
    }

    /// One of its rows, whose elements must be adjacent.
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

    /// Writes the transposed matrix to `out` in dense rows.
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

    /// Whether every element lies in the slice and no two overlap.
    fn fits_slice(&self) -> bool {
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

/// Rounds to the nearest bf16, ties to even. Only arithmetic, so that it vectorizes; NaN is returned unchanged.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    if x.is_nan() { x } else { f32::from_bits(up) }
}

impl Matrix<'_, f32> {
    /// The matrix times `scale`, rounded to bf16, as a dense matrix in the same memory order.
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

/// Processor units that multiply bf16 faster than the processor multiplies f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no other processor's unit is used"))]
enum Unit {
    /// The matrix unit of Intel's processors (AMX).
    Amx,
    /// AVX-512 dot products of bf16 pairs, on AMD's processors.
    Dot,
}

/// The fastest unit for bf16 products; the error describes how they are computed without one.
fn unit() -> Result<Unit, &'static str> {
    #[cfg(target_arch = "x86_64")]
    return bf16::unit();
    #[cfg(not(target_arch = "x86_64"))]
    Err("in f32, of rounded numbers: there is no faster way on this processor")
}

/// Writes `scale * a b` to `out` in dense rows, or adds it to `out`.
///
/// The bits do not depend on concurrent work: the kernel is selected by the processor and the sizes.
///
/// # Errors
/// Matrices that do not fit each other or their slices.
pub(crate) fn multiply<T: Accumulator>(
    out: &mut [T],
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
    how: ProductConfig,
) -> candle_core::Result<()> {
    let (a, b) = &pair;
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if b.rows != k || m.checked_mul(n) != Some(out.len()) || !a.fits_slice() || !b.fits_slice() {
        bail!("a product of {m} x {k} and {} x {n} numbers into {}: they do not fit", b.rows, out.len());
    }
    if how.precision != Precision::F32 && m.min(n).min(k) > 0 {
        // SAFETY: `out` is initialized, and stays so.
        let numbers = unsafe { &mut *(std::ptr::from_mut(out) as *mut [MaybeUninit<T>]) };
        // SAFETY: as above; sizes and slices were checked.
        if unsafe { T::multiply_rounded(numbers, pair, scale, add, how) } {
            return Ok(());
        }
    }
    multiply_exactly(out, pair, scale, add, how.in_parallel);
    Ok(())
}

/// Replaces `out` by the product, in its memory if it has that size. A new allocation is not filled with zeros first, unless it is
/// small.
///
/// # Errors
/// As [`multiply`].
pub(crate) fn multiply_into<T: Accumulator>(
    out: &mut Vec<T>,
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    how: ProductConfig,
) -> candle_core::Result<()> {
    let (a, b) = &pair;
    let len = a.rows * b.columns;
    if out.len() != len && len.saturating_mul(a.columns) > SMALL {
        *out = product_of_matrices(pair, how)?;
        return Ok(());
    }
    out.resize(len, T::zero());
    multiply(out, pair, T::one(), false, how)
}

/// Returns the product in a new allocation.
///
/// # Errors
/// As [`multiply`].
fn product_of_matrices<T: Accumulator>(
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    how: ProductConfig,
) -> candle_core::Result<Vec<T>> {
    let (a, b) = &pair;
    let len = a.rows * b.columns;
    let fits = a.columns == b.rows && a.columns > 0 && a.fits_slice() && b.fits_slice();
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
    // SAFETY: the matrices lie in their slices and fit each other and the capacity; nothing is added to it.
    unsafe { by_gemm(&mut out.spare_capacity_mut()[..len], pair, T::one(), false, how.in_parallel) };
    // SAFETY: all of the product was written.
    unsafe { out.set_len(len) };
    Ok(out)
}

/// [`multiply`] in a precision other than f32, if that differs on this processor: then all of `out` is written.
/// Returns false if it does not.
///
/// # Safety
/// The matrices fit each other, their slices and `out`, and have no dimension of 0. If `add`, `out` is initialized.
unsafe fn multiply_rounded(
    out: &mut [MaybeUninit<f32>],
    pair: (Matrix<'_, f32>, Matrix<'_, f32>),
    scale: f32,
    add: bool,
    how: ProductConfig,
) -> bool {
    // SAFETY: the caller upholds the same contract.
    if unsafe { multiply_by_unit(out, pair, scale, add, how) } {
        return true;
    }
    if how.precision != Precision::Bf16 {
        return false;
    }
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let pair = (pair.0.rounded_into(scale, &mut left), pair.1.rounded_into(1.0, &mut right));
    if !add {
        out.fill(MaybeUninit::new(0.0));
    }
    // SAFETY: `out` is initialized, either by the caller or just now.
    let out = unsafe { &mut *(std::ptr::from_mut(out) as *mut [f32]) };
    multiply_exactly(out, pair, 1.0, add, how.in_parallel);
    true
}

/// Does the same by the processor's unit for bf16 products. Returns false, with `out` as it was, if there is none for
/// this precision.
///
/// # Safety
/// As [`multiply_rounded`].
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(unused_variables, reason = "no other processor's unit is used")
)]
unsafe fn multiply_by_unit<T: Source + Sync>(
    out: &mut [MaybeUninit<f32>],
    pair: (Matrix<'_, T>, Matrix<'_, T>),
    scale: f32,
    add: bool,
    ProductConfig { precision, in_parallel }: ProductConfig,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let (unit, digits) = match (precision, unit()) {
            (Precision::Bf16, Ok(unit)) => (unit, bf16::OperandBits::Eight),
            (Precision::F32High, Ok(unit @ Unit::Amx)) => (unit, bf16::OperandBits::Sixteen),
            _ => return false,
        };
        // SAFETY: the caller upholds the same contract.
        unsafe { bf16::Bf16Product { unit, digits, in_parallel }.multiply(out, pair, scale, add) };
        true
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Computes the product of matrices that fit each other.
fn multiply_exactly<T: Real>(
    out: &mut [T],
    (a, b): (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
    in_parallel: bool,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if m.saturating_mul(n).saturating_mul(k) <= SMALL {
        vectorized!({ multiply_loops(out, a, b, scale, add) });
        return;
    }
    // SAFETY: `out` is initialized, and stays so.
    let numbers = unsafe { &mut *(std::ptr::from_mut(out) as *mut [MaybeUninit<T>]) };
    // SAFETY: the callers have checked that everything fits.
    unsafe { by_gemm(numbers, (a, b), scale, add, in_parallel) };
}

/// Computes the product with `gemm` whatever its size, so that the bits equal candle's.
///
/// # Safety
/// The matrices lie in their slices and fit each other and `out`. If `add`, `out` is initialized; otherwise all of it
/// is written.
unsafe fn by_gemm<T: Real>(
    out: &mut [MaybeUninit<T>],
    (a, b): (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
    in_parallel: bool,
) {
    if !add && transposed::is_faster(&a, &b) {
        // SAFETY: the caller upholds the same contract.
        return unsafe { transposed::by_gemm(out, (a, b), scale, in_parallel) };
    }
    // SAFETY: `out` has m * n elements, in rows of n.
    unsafe { call_gemm(out, [b.columns, 1], (a, b), scale, add, in_parallel) };
}

/// Computes the product with `gemm` into `out`, whose rows and columns are `row_stride` and `column_stride` elements apart.
///
/// # Safety
/// As [`by_gemm`]; the strides place the elements in `out`, each in a place of its own.
unsafe fn call_gemm<T: Real>(
    out: &mut [MaybeUninit<T>],
    [row_stride, column_stride]: [usize; 2],
    (a, b): (Matrix<'_, T>, Matrix<'_, T>),
    scale: T,
    add: bool,
    in_parallel: bool,
) {
    let parallelism = match in_parallel {
        true => Parallelism::Rayon(rayon::current_num_threads()),
        false => Parallelism::None,
    };
    let stride = |stride: usize| stride as isize;
    // SAFETY: `a` (m x k) and `b` (k x n) lie wholly in their slices by `fits_slice`. `out` has m * n elements in these
    // places and is borrowed mutably, so it overlaps neither; it is only read if `add`. T is f32 or f64, for which
    // `gemm` has kernels.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            out.as_mut_ptr().cast::<T>(),
            stride(column_stride),
            stride(row_stride),
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
fn multiply_loops<T: Real>(out: &mut [T], a: Matrix<'_, T>, b: Matrix<'_, T>, scale: T, add: bool) {
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
