//! Products of f32 numbers that are rounded to bf16 and summed in f32, at the speed that the processor has for them.
//!
//! Both operands are packed into tiles of 16 lines of 32 numbers (`pack`), in panels of two tiles' width; a kernel multiplies a
//! panel of one by a panel of the other: AMX where the processor has it (`amx`), dot products of AVX-512 (`dot`) otherwise.
//!
//! Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), for the order of the loops.
#![allow(unsafe_code)]

mod amx;
mod dot;
mod pack;

use std::arch::x86_64::__cpuid;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use rayon::prelude::*;

use self::pack::{Form, Operand, Part, Tile};
use super::{Matrix, Unit};

/// Lines of a tile, and pairs of numbers in each.
const LINES: usize = 16;

/// Numbers of a line of a tile.
const DEPTH: usize = 2 * LINES;

/// Lines of a panel.
const WIDTH: usize = 2 * LINES;

/// Numbers of a line that are multiplied in one go: a panel of them, 32 KiB, fits the first cache of a core.
const DEPTHS: usize = 512;

/// Columns of the right operand in one go: 1 MiB, half the second cache of a core.
const COLUMNS: usize = 1024;

/// Rows of the left operand in one go.
const ROWS: usize = 4096;

thread_local! {
    /// Both operands' tiles, kept for the next product.
    static PACKED: Cell<[Vec<Tile>; 2]> = const { Cell::new([Vec::new(), Vec::new()]) };
}

/// The fastest unit for products of bf16, or in which way they are computed where there is none.
pub(super) fn unit() -> Result<Unit, &'static str> {
    // Asking the processor is slow in a virtual machine.
    static UNIT: OnceLock<Result<Unit, &'static str>> = OnceLock::new();
    *UNIT.get_or_init(|| {
        amx::is_available().map(|()| Unit::Amx).or_else(|why| match has_avx512_bf16() && is_of_amd() {
            true => Ok(Unit::Dot),
            false => Err(why),
        })
    })
}

/// All units that the processor has, also slow ones.
#[cfg(test)]
pub(super) fn available() -> Vec<Unit> {
    let dot = has_avx512_bf16().then_some(Unit::Dot);
    amx::is_available().ok().map(|()| Unit::Amx).into_iter().chain(dot).collect()
}

/// Intel's processors with these dot products run them at half the speed: in f32 they are faster.
fn is_of_amd() -> bool {
    let vendor = __cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

fn has_avx512_bf16() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512bf16")
}

/// How a product is computed.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) unit: Unit,
    pub(super) digits: Digits,
    /// By all threads of the pool; the bits are the same.
    pub(super) in_parallel: bool,
}

/// What is kept of each number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digits {
    /// 8 binary ones: bf16.
    Eight,
    /// 16, as the sum of two bf16; what multiplies the lower halves of both is left out.
    Sixteen,
}

impl Digits {
    /// Which parts of both operands are multiplied and summed, the smallest first.
    fn parts(self) -> &'static [[Part; 2]] {
        match self {
            Self::Eight => &[[Part::High; 2]],
            Self::Sixteen => &[[Part::High, Part::Low], [Part::Low, Part::High], [Part::High, Part::High]],
        }
    }
}

impl Plan {
    /// Writes `scale * a b` into dense rows, all of them, or adds it, for matrices that fit each other, their slices and `out`; they
    /// have numbers to sum.
    ///
    /// # Safety
    /// Where it adds, `out` is initialized.
    pub(super) unsafe fn multiply(
        self,
        out: &mut [MaybeUninit<f32>],
        pair: (Matrix<'_, f32>, Matrix<'_, f32>),
        scale: f32,
        add: bool,
    ) {
        let (m, n, k) = (pair.0.rows, pair.1.columns, pair.0.columns);
        let left = Operand { lines: pair.0, form: Form::Lines, scale };
        let right = Operand { lines: pair.1.t(), form: Form::Pairs, scale: 1.0 };
        // Taken, since a thread that waits for others may begin another product.
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
                        // SAFETY: the first pass writes all blocks, unless `out` was initialized before.
                        unsafe { self.blocks(out, (n, column), [left, right], DEPTHS.min(k - depth), add) };
                    }
                    add = true;
                }
            }
        }
        PACKED.set([of_left, of_right]);
    }

    /// An operand's panels.
    fn packed<'a>(self, operand: Operand<'_>, part: Part, buffer: &'a mut Vec<Tile>) -> &'a [Tile] {
        let panel = 2 * operand.lines.columns.div_ceil(DEPTH);
        let len = operand.lines.rows.div_ceil(WIDTH) * panel;
        if buffer.len() < len {
            buffer.resize(len, Tile::ZERO);
        }
        let buffer = &mut buffer[..len];
        let pack = |(at, tiles): (usize, &mut [Tile])| {
            // SAFETY: there is a kernel only where the processor has AVX-512 BF16, and the caller of `multiply` has checked the
            // matrices.
            unsafe { operand.part(at * WIDTH..(at + 1) * WIDTH, 0..usize::MAX).pack(tiles, part) }
        };
        match self.in_parallel {
            true => buffer.par_chunks_exact_mut(panel).enumerate().for_each(pack),
            false => buffer.chunks_exact_mut(panel).enumerate().for_each(pack),
        }
        buffer
    }

    /// Multiplies packed operands into rows of `stride` numbers, from one column on.
    ///
    /// # Safety
    /// Where it adds, these columns of `out` are initialized.
    unsafe fn blocks(
        self,
        out: &mut [MaybeUninit<f32>],
        (stride, column): (usize, usize),
        operands: [&[Tile]; 2],
        depths: usize,
        add: bool,
    ) {
        let panel = 2 * depths.div_ceil(DEPTH);
        let [left, right] = operands;
        let rows = |(out, left): (&mut [MaybeUninit<f32>], &[Tile])| {
            let mut sums = Sums::new(self.unit);
            for (out, left) in out.chunks_mut(WIDTH * stride).zip(left.chunks_exact(panel)) {
                for (right, column) in right.chunks_exact(panel).zip((column..).step_by(WIDTH)) {
                    // SAFETY: the caller answers for `out`.
                    unsafe { sums.block(out, (stride, column), [left, right], add) };
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

/// One thread's kernel.
struct Sums {
    tiles: Option<amx::Tiles>,
    /// A block at the edge.
    edge: [f32; WIDTH * WIDTH],
}

impl Sums {
    fn new(unit: Unit) -> Self {
        let tiles = if unit == Unit::Amx { amx::Tiles::new() } else { None };
        Self { tiles, edge: [0.0; WIDTH * WIDTH] }
    }

    /// The block of rows that begins at a column.
    ///
    /// # Safety
    /// Where it adds, the block is initialized.
    unsafe fn block(
        &mut self,
        out: &mut [MaybeUninit<f32>],
        (stride, column): (usize, usize),
        panels: [&[Tile]; 2],
        add: bool,
    ) {
        let (rows, width) = (out.len() / stride, WIDTH.min(stride - column));
        if rows == WIDTH && width == WIDTH {
            // SAFETY: `out` has WIDTH rows of `stride` numbers, of which WIDTH are left from `column` on.
            return unsafe { self.run(out[column..].as_mut_ptr().cast(), stride, panels, add) };
        }
        let edge = self.edge.as_mut_ptr();
        if add {
            for (edge, row) in self.edge.chunks_exact_mut(WIDTH).zip(out.chunks_exact(stride)) {
                let row = row[column..column + width].iter();
                // SAFETY: the caller answers for what is added to.
                edge.iter_mut().zip(row).for_each(|(edge, x)| *edge = unsafe { x.assume_init() });
            }
        }
        // SAFETY: `edge` has WIDTH rows of WIDTH numbers.
        unsafe { self.run(edge, WIDTH, panels, add) };
        for (edge, row) in self.edge.chunks_exact(WIDTH).zip(out.chunks_exact_mut(stride)) {
            row[column..column + width].iter_mut().zip(edge).for_each(|(x, &edge)| _ = x.write(edge));
        }
    }

    /// # Safety
    /// `out` has WIDTH rows of WIDTH numbers, each begins `stride` numbers after the one before.
    unsafe fn run(&self, out: *mut f32, stride: usize, panels: [&[Tile]; 2], add: bool) {
        // SAFETY: the caller answers for `out`; there is a kernel only where the processor has AVX-512 BF16.
        unsafe {
            match &self.tiles {
                Some(tiles) => tiles.block(out, stride, panels, add),
                None => dot::block(out, stride, panels, add),
            }
        }
    }
}
