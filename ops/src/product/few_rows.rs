//! Products with few rows of 16 bits, as in generating text: each element of the other operand is read once, where packing
//! it would take longer than multiplying it.

use super::{Matrix, Narrow};
use crate::blocks::blocks_of_work;
use crate::simd::vectorized;

/// At most this many rows.
pub(super) const FEW: usize = 4;

/// Elements of a line that are widened at a time; they stay in a core's L1 cache.
const PART: usize = 512;

/// Partial sums of a line and a row: a processor adds to several vectors of them at once.
const LANES: usize = 64;

/// Lines of a task.
const LINES: usize = 64;

/// Returns `a lines'`. Elements of a row and of a line are adjacent. The bits do not depend on the number of threads.
pub(super) fn few_rows<T: Narrow>(a: Matrix<'_, T>, lines: Matrix<'_, T>) -> Vec<f32> {
    let (rows, depth) = (a.rows, a.columns);
    let mut wide = Vec::new();
    let a = a.widened_into(&mut wide);
    // Line by line: the transposed product.
    let mut sums = vec![0.0; lines.rows * rows];
    blocks_of_work([&mut sums], LINES * rows, lines.rows * depth, |at, [sums]| {
        let (mut part, mut lanes) = ([0.0; PART], [[0.0; LANES]; FEW]);
        for (sums, line) in sums.chunks_exact_mut(rows).zip(at / rows..) {
            multiply_line(a, lines.row(line), sums, &mut part, &mut lanes[..rows]);
        }
    });
    if rows == 1 {
        return sums;
    }
    let mut out = Vec::new();
    Matrix::new(&sums, lines.rows, rows, rows).transpose_into(&mut out);
    out
}

/// Writes the products of all rows and a line to `sums`. A part of the line, widened, and partial sums are kept in memory that
/// the next line uses again.
fn multiply_line<T: Narrow>(
    a: Matrix<'_, f32>,
    line: &[T],
    sums: &mut [f32],
    part: &mut [f32; PART],
    lanes: &mut [[f32; LANES]],
) {
    lanes.fill([0.0; LANES]);
    for (numbers, begin) in line.chunks(PART).zip((0..).step_by(PART)) {
        let part = &mut part[..numbers.len()];
        T::widen_into(numbers, part);
        vectorized!({
            for (row, lanes) in lanes.iter_mut().enumerate() {
                add_products(lanes, &a.row(row)[begin..], part);
            }
        });
    }
    for (sum, lanes) in sums.iter_mut().zip(lanes) {
        *sum = sum_of(lanes);
    }
}

/// The sum of all elements, half by half.
fn sum_of(lanes: &mut [f32; LANES]) -> f32 {
    let mut len = LANES;
    while len > 1 {
        len /= 2;
        let (first, second) = lanes.split_at_mut(len);
        first.iter_mut().zip(second).for_each(|(sum, x)| *sum += *x);
    }
    lanes[0]
}

#[inline(always)]
fn add_products(lanes: &mut [f32; LANES], row: &[f32], part: &[f32]) {
    let ((chunks, rest), (others, _)) = (part.as_chunks::<LANES>(), row.as_chunks::<LANES>());
    for (chunk, other) in chunks.iter().zip(others) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(chunk).zip(other) {
            *lane += x * y;
        }
    }
    let row = &row[chunks.len() * LANES..];
    for ((lane, &x), &y) in lanes.iter_mut().zip(rest).zip(row) {
        *lane += x * y;
    }
}
