//! Blocks of a bf16 product with AVX-512's dot products of bf16 pairs.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_storeu_ps,
};

use super::pack::Tile;
use super::{LINES, WIDTH};

/// Rows of a block whose sums are in registers at the same time: two registers of sums each, and two for the other
/// operand.
const ROWS: usize = 8;

/// Writes, or adds to `out`, a block of [`WIDTH`] x [`WIDTH`] sums; both panels have the same number of tiles.
///
/// # Safety
/// The processor has AVX-512 BF16. `out` has WIDTH rows of WIDTH elements; consecutive rows begin `stride` elements
/// apart.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn block(out: *mut f32, stride: usize, [a, b]: [&[Tile]; 2], add: bool) {
    for first in (0..WIDTH).step_by(ROWS) {
        let row = |at: usize| out.wrapping_add((first + at) * stride);
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        if add {
            for (at, [left, right]) in sums.iter_mut().enumerate() {
                // SAFETY: the caller guarantees the rows of `out`.
                unsafe {
                    (*left, *right) = (_mm512_loadu_ps(row(at)), _mm512_loadu_ps(row(at).wrapping_add(LINES)))
                };
            }
        }
        let half = first / LINES;
        let lines = first % LINES..first % LINES + ROWS;
        for (a, b) in a.chunks_exact(2).zip(b.chunks_exact(2)) {
            add_tiles(&mut sums, &a[half].0[lines.clone()], [&b[0], &b[1]]);
        }
        for (at, [left, right]) in sums.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                _mm512_storeu_ps(row(at), left);
                _mm512_storeu_ps(row(at).wrapping_add(LINES), right);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add_tiles(sums: &mut [[__m512; 2]; ROWS], lines: &[[u32; LINES]], [left, right]: [&Tile; 2]) {
    for pair in 0..LINES {
        let [left, right] = [left, right].map(|tile| bits(&tile.0[pair]));
        for (line, [of_left, of_right]) in lines.iter().zip(&mut *sums) {
            // SAFETY: both types have 512 bits, and all bit patterns are valid.
            let x: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(line[pair] as i32)) };
            *of_left = _mm512_dpbf16_ps(*of_left, x, left);
            *of_right = _mm512_dpbf16_ps(*of_right, x, right);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bits(pairs: &[u32; LINES]) -> __m512bh {
    // SAFETY: both types have 512 bits, and all bit patterns are valid.
    unsafe { std::mem::transmute(*pairs) }
}
