//! Slices divided into blocks that are processed in parallel.

use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

use crate::simd::vectorized;

/// Elements of a block in elementwise work: large enough to outweigh the cost of scheduling a task, small enough for
/// the cache.
pub const BLOCK: usize = 1 << 14;

/// Whether a pool of threads would not help: one of a single thread is slower than the caller, since it has to be woken, and has its
/// data in another core's cache.
pub fn has_one_thread() -> bool {
    rayon::current_num_threads() == 1
}

/// Amounts of work, in elements, below this run on the calling thread.
const SMALL: usize = 1 << 15;

/// Divides slices of equal length into blocks of `size` elements (the last may be shorter) and calls `f` with the
/// index of the first element and the blocks at it. Results are in block order. The blocks depend on `size` alone, so
/// the result has the same bits whatever the number of threads.
pub fn blocks<T: Send, R: Send, const N: usize>(
    slices: [&mut [T]; N],
    size: usize,
    f: impl Fn(usize, [&mut [T]; N]) -> R + Sync,
) -> Vec<R> {
    let work = slices.first().map_or(0, |slice| slice.len());
    blocks_of_work(slices, size, work, f)
}

/// [`blocks`] where `f` processes `work` elements in all, which may differ from the length of the slices.
pub fn blocks_of_work<T: Send, R: Send, const N: usize>(
    slices: [&mut [T]; N],
    size: usize,
    work: usize,
    f: impl Fn(usize, [&mut [T]; N]) -> R + Sync,
) -> Vec<R> {
    let (size, len) = (size.max(1), slices.first().map_or(0, |slice| slice.len()));
    let mut rest = slices.map(|slice| slice.chunks_mut(size));
    let next = |_| rest.each_mut().map(|slice| slice.next().unwrap_or_default());
    let parts: Vec<[&mut [T]; N]> = (0..len.div_ceil(size)).map(next).collect();
    let run = |(index, part)| f(index * size, part);
    if work < SMALL || parts.len() == 1 || has_one_thread() {
        parts.into_iter().enumerate().map(run).collect()
    } else {
        parts.into_par_iter().enumerate().map(run).collect()
    }
}

/// Applies `f`, which must always be inlined, to each element. Unlike a vector of zeros that is then written to, this touches
/// the memory once.
#[inline(always)]
pub(crate) fn map<T: Copy + Send + Sync>(x: &[T], f: impl Fn(T) -> T + Sync) -> Vec<T> {
    // Loops over slices, not over adapters of iterators: the compiler does not inline those of long functions, and then nothing
    // is vectorized.
    write_blocks(x.len(), |place, block| {
        let x = &x[place];
        vectorized!({
            for (slot, &x) in block.iter_mut().zip(x) {
                slot.write(f(x));
            }
        });
    })
}

/// The same for the pairs of elements of two slices of equal length.
#[inline(always)]
pub(crate) fn map_pairs<T: Copy + Send + Sync>(x: &[T], y: &[T], f: impl Fn(T, T) -> T + Sync) -> Vec<T> {
    write_blocks(x.len(), |place, block| {
        let (x, y) = (&x[place.clone()], &y[place]);
        vectorized!({
            for ((slot, &x), &y) in block.iter_mut().zip(x).zip(y) {
                slot.write(f(x, y));
            }
        });
    })
}

/// Returns `len` elements; `write` gets the range of a block and must write all of it.
#[allow(unsafe_code)]
#[inline(always)]
fn write_blocks<T: Send>(len: usize, write: impl Fn(Range<usize>, &mut [MaybeUninit<T>]) + Sync) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    blocks([&mut out.spare_capacity_mut()[..len]], BLOCK, |at, [block]| write(at..at + block.len(), block));
    // SAFETY: the blocks cover all elements, and both callers write each element of a block: the slices that they loop over
    // are as long as the block, or they panic.
    unsafe { out.set_len(len) };
    out
}

/// Block size in elements, a multiple of the row length `width`.
pub(crate) fn of_rows(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1) * width.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_numbers_are_in_order() {
        for len in [0, 1, BLOCK, 2 * SMALL + 5] {
            let numbers: Vec<usize> = (0..len).collect();
            assert!(map(&numbers, |x| x + 1).into_iter().eq(1..len + 1));
            assert!(map_pairs(&numbers, &numbers, |x, y| x + y).into_iter().eq((0..len).map(|x| 2 * x)));
        }
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn slices_of_unequal_length_are_a_bug() {
        map_pairs(&[1, 2, 3], &[1, 2], |x, y| x + y);
    }

    #[test]
    fn each_number_is_met_once_and_in_order() {
        for (len, size) in [(0, 4), (3, 4), (4, 4), (9, 4), (2 * SMALL + 5, 1000), (5, 0)] {
            let (mut a, mut b) = (vec![0usize; len], vec![0usize; len]);
            let starts = blocks([&mut a, &mut b], size, |start, [a, b]| {
                for (at, (a, b)) in a.iter_mut().zip(b).enumerate() {
                    *a += start + at;
                    *b += 1;
                }
                start
            });
            assert!(starts.is_sorted() && starts.len() == len.div_ceil(size.max(1)), "{len} by {size}");
            assert!(a.iter().copied().eq(0..len) && b.iter().all(|&count| count == 1), "{len} by {size}");
        }
    }

    #[test]
    fn blocks_hold_whole_rows() {
        assert_eq!((of_rows(0), of_rows(100)), (BLOCK, BLOCK / 100 * 100));
        assert_eq!(of_rows(BLOCK + 1), BLOCK + 1);
    }
}
