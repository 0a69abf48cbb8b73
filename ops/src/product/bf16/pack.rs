//! Packing of operands into bf16 tiles, in the order in which the kernels read them.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_castsi512_ps, _mm512_castsi512_si256, _mm512_cvtepu16_epi32,
    _mm512_cvtne2ps_pbh, _mm512_cvtph_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_permutexvar_epi16, _mm512_set1_ps, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_slli_epi32, _mm512_sub_ps, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::ops::Range;

use half::{bf16, f16};

use super::{DEPTH, LINES, WIDTH};
use crate::product::Matrix;

/// 16 lines of 16 pairs adjacent in depth, or 16 pairs of 16 lines each: see [`TileOrder`].
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Tile(pub(super) [[u32; LINES]; LINES]);

impl Tile {
    pub(super) const ZERO: Self = Self([[0; LINES]; LINES]);
}

/// Order of the elements in a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TileOrder {
    /// Line by line: the left operand, whose lines are rows.
    Lines,
    /// Pair by pair: the right operand, whose lines are columns.
    Pairs,
}

/// Which part of each number is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    /// The number, rounded to bf16.
    High,
    /// The rounding error of `High`, rounded to bf16.
    Low,
}

/// An element of an operand.
pub trait Source: Copy + Default {
    /// Reads the elements of a mask as f32, and zeros for the others.
    ///
    /// # Safety
    /// The processor has AVX-512 with BW. The elements can be read.
    unsafe fn load(mask: u16, from: *const Self) -> __m512;
}

impl Source for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: elements outside the mask are not read.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

impl Source for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: elements outside the mask are not read.
        let words = unsafe { _mm512_maskz_loadu_epi16(mask.into(), from.cast()) };
        let words = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
    }
}

impl Source for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: elements outside the mask are not read.
        let words = unsafe { _mm512_maskz_loadu_epi16(mask.into(), from.cast()) };
        _mm512_cvtph_ps(_mm512_castsi512_si256(words))
    }
}

/// An operand as lines (rows of the left one, columns of the right one); the sums run along a line, its depth.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a, T> {
    pub(super) lines: Matrix<'a, T>,
    pub(super) form: TileOrder,
    pub(super) scale: f32,
}

impl<T: Source> Operand<'_, T> {
    /// A range of lines and of depths, clipped to the operand.
    pub(super) fn part(self, lines: Range<usize>, depths: Range<usize>) -> Self {
        let Matrix { rows, columns, .. } = self.lines;
        let (lines, depths) = (lines.start..lines.end.min(rows), depths.start..depths.end.min(columns));
        Self { lines: self.lines.rows(lines).columns(depths), ..self }
    }

    /// Packs the tiles of one panel of [`WIDTH`] lines, with zeros beyond the edges.
    ///
    /// # Safety
    /// The processor has AVX-512 with BW and BF16. The whole matrix lies in its slice.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn pack(&self, out: &mut [Tile], part: Half) {
        // In memory order.
        let depths = out.len() / 2;
        let by_depth = self.lines.column_stride == 1;
        for at in 0..out.len() {
            let (half, step) = if by_depth { (at / depths, at % depths) } else { (at % 2, at / 2) };
            // SAFETY: the caller guarantees the processor and the matrix.
            unsafe { self.tile(&mut out[2 * step + half], half * LINES, step * DEPTH, part) };
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn tile(&self, tile: &mut Tile, line: usize, depth: usize, part: Half) {
        const { assert!(WIDTH == 2 * LINES && DEPTH == 2 * LINES) };
        let Matrix { data, rows, columns, row_stride, column_stride } = self.lines;
        let (lines, depths) =
            (rows.saturating_sub(line).min(LINES), columns.saturating_sub(depth).min(DEPTH));
        if lines == 0 || depths == 0 {
            *tile = Tile::ZERO;
            return;
        }
        let from = data.as_ptr().wrapping_add(line * row_stride + depth * column_stride);
        let source = |from, stride| TileSource { from, stride, lines, depths, scale: self.scale, part };
        // SAFETY: both have 16 times 512 bits and the same alignment, and all bit patterns are valid.
        let words = unsafe { &mut *std::ptr::from_mut(tile).cast::<[__m512i; LINES]>() };
        // SAFETY: the matrix lies in its slice; what is adjacent in memory has a stride of 1.
        let form = unsafe {
            if column_stride == 1 {
                source(from, row_stride).by_lines(words);
                TileOrder::Lines
            } else if row_stride == 1 {
                source(from, column_stride).by_pairs(words);
                TileOrder::Pairs
            } else {
                let gathered = gathered(
                    &data[line * row_stride + depth * column_stride..],
                    [row_stride, column_stride],
                    [lines, depths],
                );
                source(gathered.as_ptr(), DEPTH).by_lines(words);
                TileOrder::Lines
            }
        };
        if form != self.form {
            transpose(words);
        }
    }
}

/// Copies a tile's elements from where neither lines nor depths are adjacent.
#[cold]
#[inline(never)]
fn gathered<T: Source>(
    data: &[T],
    [row_stride, column_stride]: [usize; 2],
    [lines, depths]: [usize; 2],
) -> [T; LINES * DEPTH] {
    let mut gathered = [T::default(); LINES * DEPTH];
    for (at, to) in gathered.chunks_exact_mut(DEPTH).take(lines).enumerate() {
        let numbers = data[at * row_stride..].iter().step_by(column_stride.max(1)).take(depths);
        to.iter_mut().zip(numbers).for_each(|(to, &x)| *to = x);
    }
    gathered
}

/// Input of a tile, clipped to the matrix: at most 16 lines of at most 32 elements.
#[derive(Clone, Copy)]
struct TileSource<T> {
    from: *const T,
    /// From line to line, or from element to element of a line where the lines are adjacent.
    stride: usize,
    lines: usize,
    depths: usize,
    scale: f32,
    part: Half,
}

impl<T: Source> TileSource<T> {
    fn is_whole(&self) -> bool {
        self.lines == LINES && self.depths == DEPTH
    }

    /// Reads lines of 16 pairs each.
    ///
    /// # Safety
    /// `lines` lines of `depths` adjacent elements can be read.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn by_lines(self, words: &mut [__m512i; LINES]) {
        if self.is_whole() {
            for (line, word) in words.iter_mut().enumerate() {
                let at = self.from.wrapping_add(line * self.stride);
                // SAFETY: the caller guarantees the line's 32 elements.
                let numbers = unsafe { [T::load(ALL, at), T::load(ALL, at.wrapping_add(LINES))] };
                *word = self.rounded(numbers);
            }
            return;
        }
        *words = [_mm512_setzero_si512(); LINES];
        let masks = [first(self.depths), first(self.depths.saturating_sub(LINES))];
        for (line, word) in words.iter_mut().enumerate().take(self.lines) {
            let at = self.from.wrapping_add(line * self.stride);
            // SAFETY: elements outside the masks are not read.
            let numbers = unsafe { [T::load(masks[0], at), T::load(masks[1], at.wrapping_add(LINES))] };
            *word = self.rounded(numbers);
        }
    }

    /// Reads pairs of 16 lines each.
    ///
    /// # Safety
    /// At each of `depths` depths, `lines` adjacent elements can be read.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn by_pairs(self, words: &mut [__m512i; LINES]) {
        if self.is_whole() {
            for (pair, word) in words.iter_mut().enumerate() {
                let at = self.from.wrapping_add(2 * pair * self.stride);
                // SAFETY: the caller guarantees the 16 elements at both depths.
                let numbers = unsafe { [T::load(ALL, at), T::load(ALL, at.wrapping_add(self.stride))] };
                *word = interleaved(self.rounded(numbers));
            }
            return;
        }
        *words = [_mm512_setzero_si512(); LINES];
        for (pair, word) in words.iter_mut().enumerate().take(self.depths.div_ceil(2)) {
            let at = self.from.wrapping_add(2 * pair * self.stride);
            let masks = [first(self.lines), if 2 * pair + 1 < self.depths { first(self.lines) } else { 0 }];
            // SAFETY: elements outside the masks are not read.
            let numbers = unsafe { [T::load(masks[0], at), T::load(masks[1], at.wrapping_add(self.stride))] };
            *word = interleaved(self.rounded(numbers));
        }
    }

    /// Rounds 32 numbers to bf16, the first 16 in the lower half.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn rounded(self, [low, high]: [__m512; 2]) -> __m512i {
        // Without closures: they are called in functions that are not compiled for these instructions, and then not inlined.
        let scale = _mm512_set1_ps(self.scale);
        let [low, high] = [_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale)];
        match self.part {
            Half::High => round([low, high]),
            Half::Low => round([rounding_error(low), rounding_error(high)]),
        }
    }
}

/// What rounding to bf16 leaves of each number.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn rounding_error(x: __m512) -> __m512 {
    let high = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(round([x, x])));
    _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high)))
}

/// Mask of all 16 elements.
const ALL: u16 = u16::MAX;

/// Mask of the first `count` of 16 elements.
fn first(count: usize) -> u16 {
    ((1u32 << count.min(LINES)) - 1) as u16
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn round([low, high]: [__m512; 2]) -> __m512i {
    // SAFETY: both have 512 bits, and all bit patterns are valid.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Interleaves the elements of the lower and the upper half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleaved(halves: __m512i) -> __m512i {
    const ORDER: [u16; 2 * LINES] = {
        let (mut order, mut at) = ([0; 2 * LINES], 0);
        while at < 2 * LINES {
            order[at] = (at / 2 + at % 2 * LINES) as u16;
            at += 1;
        }
        order
    };
    // SAFETY: `ORDER` has 32 elements of 16 bits.
    let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
    _mm512_permutexvar_epi16(order, halves)
}

/// Transposes a matrix of 16 x 16 words in place.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(words: &mut [__m512i; LINES]) {
    let mut halves = [_mm512_setzero_si512(); LINES];
    for at in 0..LINES / 2 {
        let (one, other) = (words[2 * at], words[2 * at + 1]);
        (halves[2 * at], halves[2 * at + 1]) =
            (_mm512_unpacklo_epi32(one, other), _mm512_unpackhi_epi32(one, other));
    }
    // For each four rows: register c % 4 holds, in its quarter c / 4, column c of all four.
    let mut quarters = [_mm512_setzero_si512(); LINES];
    for four in 0..LINES / 4 {
        let at = 4 * four;
        let (a, b, c, d) = (halves[at], halves[at + 1], halves[at + 2], halves[at + 3]);
        quarters[4 * four] = _mm512_unpacklo_epi64(a, c);
        quarters[4 * four + 1] = _mm512_unpackhi_epi64(a, c);
        quarters[4 * four + 2] = _mm512_unpacklo_epi64(b, d);
        quarters[4 * four + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for at in 0..4 {
        let (a, b, c, d) = (quarters[at], quarters[4 + at], quarters[8 + at], quarters[12 + at]);
        let (even_low, odd_low) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (even_high, odd_high) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
        words[at] = _mm512_shuffle_i32x4::<0x88>(even_low, even_high);
        words[8 + at] = _mm512_shuffle_i32x4::<0xdd>(even_low, even_high);
        words[4 + at] = _mm512_shuffle_i32x4::<0x88>(odd_low, odd_high);
        words[12 + at] = _mm512_shuffle_i32x4::<0xdd>(odd_low, odd_high);
    }
}
