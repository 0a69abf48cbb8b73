//! bf16 matrix products: f32 operands rounded to bf16, sums in f32, with AMX or AVX-512.
//!
//! Both operands are packed into tiles of 16 lines of 32 elements (`pack`), in panels two tiles wide; a kernel
//! multiplies a panel of one by a panel of the other: AMX where the processor has it (`amx`), otherwise AVX-512 dot
//! products (`dot`).
//!
//! Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), for the loop order.
#![allow(unsafe_code)]

mod amx;
mod dot;
mod pack;

use std::arch::x86_64::__cpuid;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use rayon::prelude::*;

pub(crate) use self::pack::Source;
use self::pack::{Half, Operand, Tile, TileOrder};
use super::{Matrix, Unit};

/// Lines of a tile, and bf16 pairs in each.
const LINES: usize = 16;

/// Elements in a line of a tile.
const DEPTH: usize = 2 * LINES;

/// Lines of a panel.
const WIDTH: usize = 2 * LINES;

/// Block size along the sums: a panel of it, 32 KiB, fits a core's L1 cache.
const DEPTHS: usize = 512;

/// Block size in columns of the right operand: 1 MiB packed, half a core's L2 cache.
const COLUMNS: usize = 1024;

/// Block size in rows of the left operand.
const ROWS: usize = 4096;

thread_local! {
    /// Buffers for both operands' tiles, reused by the next product.
    static PACKED: Cell<[Vec<Tile>; 2]> = const { Cell::new([Vec::new(), Vec::new()]) };
}

/// The fastest unit for bf16 products; the error describes how they are computed without one.
pub(super) fn unit() -> Result<Unit, &'static str> {
    // Cached: `cpuid` is slow in a virtual machine.
    static UNIT: OnceLock<Result<Unit, &'static str>> = OnceLock::new();
    *UNIT.get_or_init(|| fastest(amx::is_available(), has_avx512_bf16() && is_of_amd()))
}

/// [`unit`] for AMX, or why it cannot be used, and whether the processor has fast dot products.
fn fastest(amx: Result<(), &'static str>, has_fast_dot: bool) -> Result<Unit, &'static str> {
    amx.map(|()| Unit::Amx).or_else(|why| if has_fast_dot { Ok(Unit::Dot) } else { Err(why) })
}

/// All units of the processor, including slow ones.
#[cfg(test)]
pub(super) fn available() -> Vec<Unit> {
    let dot = has_avx512_bf16().then_some(Unit::Dot);
    amx::is_available().ok().map(|()| Unit::Amx).into_iter().chain(dot).collect()
}

/// Intel's processors run these dot products at half the speed, slower than f32.
fn is_of_amd() -> bool {
    let vendor = __cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

fn has_avx512_bf16() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512bf16")
}

/// How a bf16 product is computed.
#[derive(Clone, Copy)]
pub(super) struct Bf16Product {
    pub(super) unit: Unit,
    pub(super) digits: OperandBits,
    /// Whether all threads of the pool take part; the bits are the same.
    pub(super) in_parallel: bool,
}

/// Precision kept of each operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperandBits {
    /// 8 bits: bf16.
    Eight,
    /// 16 bits, as the sum of two bf16; the product of both lower halves is omitted.
    Sixteen,
}

impl OperandBits {
    /// Pairs of operand parts that are multiplied and summed, the smallest products first.
    fn parts(self) -> &'static [[Half; 2]] {
        match self {
            Self::Eight => &[[Half::High; 2]],
            Self::Sixteen => &[[Half::High, Half::Low], [Half::Low, Half::High], [Half::High, Half::High]],
        }
    }
}

impl Bf16Product {
    /// Writes `scale * a b` to all of `out` in dense rows, or adds it. The matrices must fit each other, their slices
    /// and `out`, and have no dimension of 0.
    ///
    /// # Safety
    /// If `add`, `out` is initialized.
    pub(super) unsafe fn multiply<T: Source + Sync>(
        self,
        out: &mut [MaybeUninit<f32>],
        pair: (Matrix<'_, T>, Matrix<'_, T>),
        scale: f32,
        add: bool,
    ) {
        let (m, n, k) = (pair.0.rows, pair.1.columns, pair.0.columns);
        let left = Operand { lines: pair.0, form: TileOrder::Lines, scale };
        let right = Operand { lines: pair.1.t(), form: TileOrder::Pairs, scale: 1.0 };
        // Taken, since a thread that waits for others in rayon may begin another product.
        let [mut of_left, mut of_right] = PACKED.take();
        for (out, row) in out.chunks_mut(ROWS * n).zip((0..m).step_by(ROWS)) {
            let mut add = add;
            for depth in (0..k).step_by(DEPTHS) {
                for &[of_a, of_b] in self.digits.parts() {
                    let depths = depth..depth + DEPTHS;
                    let left = self.packed(left.part(row..row + ROWS, depths.clone()), of_a, &mut of_left);
                    for column in (0..n).step_by(COLUMNS) {
                        let right = right.part(column..column + COLUMNS, depths.clone());
                        let right = self.packed(right, of_b, &mut of_right);
                        // SAFETY: the first iteration writes all blocks, unless `out` was initialized before.
                        unsafe { self.blocks(out, n, column, [left, right], DEPTHS.min(k - depth), add) };
                    }
                    add = true;
                }
            }
        }
        PACKED.set([of_left, of_right]);
    }

    /// Packs an operand into panels.
    fn packed<'a, T: Source + Sync>(
        self,
        operand: Operand<'_, T>,
        part: Half,
        buffer: &'a mut Vec<Tile>,
    ) -> &'a [Tile] {
        let panel = 2 * operand.lines.columns.div_ceil(DEPTH);
        let len = operand.lines.rows.div_ceil(WIDTH) * panel;
        if buffer.len() < len {
            buffer.resize(len, Tile::ZERO);
        }
        let buffer = &mut buffer[..len];
        let pack = |(at, tiles): (usize, &mut [Tile])| {
            // SAFETY: a unit exists only where the processor has AVX-512 BF16, and the caller of `multiply` has
            // checked the matrices.
            unsafe { operand.part(at * WIDTH..(at + 1) * WIDTH, 0..usize::MAX).pack(tiles, part) }
        };
        match self.in_parallel {
            true => buffer.par_chunks_exact_mut(panel).enumerate().for_each(pack),
            false => buffer.chunks_exact_mut(panel).enumerate().for_each(pack),
        }
        buffer
    }

    /// Multiplies packed operands into rows of `stride` elements, from `column` on.
    ///
    /// # Safety
    /// If `add`, these columns of `out` are initialized.
    unsafe fn blocks(
        self,
        out: &mut [MaybeUninit<f32>],
        stride: usize,
        column: usize,
        operands: [&[Tile]; 2],
        depths: usize,
        add: bool,
    ) {
        let panel = 2 * depths.div_ceil(DEPTH);
        let [left, right] = operands;
        let rows = |(out, left): (&mut [MaybeUninit<f32>], &[Tile])| {
            let mut sums = KernelState::new(self.unit);
            for (out, left) in out.chunks_mut(WIDTH * stride).zip(left.chunks_exact(panel)) {
                for (right, column) in right.chunks_exact(panel).zip((column..).step_by(WIDTH)) {
                    // SAFETY: the caller guarantees `out`.
                    unsafe { sums.block(out, stride, column, [left, right], add) };
                }
            }
        };
        let panels = left.len() / panel;
        match self.in_parallel {
            true => {
                let task = panels.div_ceil(4 * rayon::current_num_threads());
                out.par_chunks_mut(task * WIDTH * stride).zip(left.par_chunks(task * panel)).for_each(rows);
            }
            false => rows((out, left)),
        }
    }
}

/// Kernel state of one thread.
struct KernelState {
    tiles: Option<amx::Tiles>,
    /// Buffer for a partial block at the edge of the result.
    edge: [f32; WIDTH * WIDTH],
}

impl KernelState {
    fn new(unit: Unit) -> Self {
        let tiles = if unit == Unit::Amx { amx::Tiles::new() } else { None };
        Self { tiles, edge: [0.0; WIDTH * WIDTH] }
    }

    /// Computes the block of the rows `out` that begins at `column`.
    ///
    /// # Safety
    /// If `add`, the block is initialized.
    unsafe fn block(
        &mut self,
        out: &mut [MaybeUninit<f32>],
        stride: usize,
        column: usize,
        panels: [&[Tile]; 2],
        add: bool,
    ) {
        let (rows, width) = (out.len() / stride, WIDTH.min(stride - column));
        if rows == WIDTH && width == WIDTH {
            // SAFETY: `out` has WIDTH rows of `stride` elements, at least WIDTH of them from `column` on.
            return unsafe { self.run(out[column..].as_mut_ptr().cast(), stride, panels, add) };
        }
        let edge = self.edge.as_mut_ptr();
        if add {
            for (edge, row) in self.edge.chunks_exact_mut(WIDTH).zip(out.chunks_exact(stride)) {
                let row = row[column..column + width].iter();
                // SAFETY: if `add`, the caller guarantees that the block is initialized.
                edge.iter_mut().zip(row).for_each(|(edge, x)| *edge = unsafe { x.assume_init() });
            }
        }
        // SAFETY: `edge` has WIDTH rows of WIDTH elements.
        unsafe { self.run(edge, WIDTH, panels, add) };
        for (edge, row) in self.edge.chunks_exact(WIDTH).zip(out.chunks_exact_mut(stride)) {
            row[column..column + width].iter_mut().zip(edge).for_each(|(x, &edge)| _ = x.write(edge));
        }
    }

    /// # Safety
    /// `out` has WIDTH rows of WIDTH elements; consecutive rows begin `stride` elements apart.
    unsafe fn run(&self, out: *mut f32, stride: usize, panels: [&[Tile]; 2], add: bool) {
        // SAFETY: the caller guarantees `out`; a unit exists only where the processor has AVX-512 BF16.
        unsafe {
            match &self.tiles {
                Some(tiles) => tiles.block(out, stride, panels, add),
                None => dot::block(out, stride, panels, add),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_amx_the_next_best_unit_is_used() {
        let absent =
            amx::usable(false, || unreachable!("the system is asked for what the processor has not"));
        let refused = amx::usable(true, || false);
        assert!(absent.unwrap_err().contains("has no matrix unit"));
        assert!(refused.unwrap_err().contains("the system refuses the state of the matrix unit"));
        assert_eq!(fastest(amx::usable(true, || true), true), Ok(Unit::Amx));
        for without in [absent, refused] {
            assert_eq!(fastest(without, true), Ok(Unit::Dot));
            assert_eq!(fastest(without, false).map(|_| ()), without);
        }
    }
}
