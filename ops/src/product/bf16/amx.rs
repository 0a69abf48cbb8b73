//! Blocks of a bf16 product on Intel's matrix unit (AMX).
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and the Linux kernel's
//! documentation of features that a program must request (`x86/xstate`).
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::pack::Tile;
use super::{LINES, WIDTH};

/// Checks that the processor has AMX for bf16 and the system lets this process use it; the error describes how
/// products are computed instead.
pub(super) fn is_available() -> Result<(), &'static str> {
    static FOUND: OnceLock<Result<(), &'static str>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        const TILES_OF_BF16: u32 = 1 << 22 | 1 << 24;
        let of_processor = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILES_OF_BF16 == TILES_OF_BF16;
        usable(of_processor && super::has_avx512_bf16(), ask_for_tiles)
    })
}

/// [`is_available`] for what the processor has and the system answers.
pub(super) fn usable(of_processor: bool, ask: impl FnOnce() -> bool) -> Result<(), &'static str> {
    if !of_processor {
        return Err("in f32, of rounded numbers: the processor has no matrix unit (AMX) for them");
    }
    if !ask() {
        return Err("in f32, of rounded numbers: the system refuses the state of the matrix unit (AMX)");
    }
    Ok(())
}

/// Requests permission from Linux to use the tile state, for all threads of the process. It may be requested
/// repeatedly.
#[cfg(target_os = "linux")]
fn ask_for_tiles() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: this system call changes what the process may use, and reads and writes none of its memory.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn ask_for_tiles() -> bool {
    false
}

/// Shape of the eight tiles: palette 1, each of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_of_row: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = {
    let (mut bytes_of_row, mut rows, mut tile) = ([0; 16], [0; 16], 0);
    while tile < 8 {
        (bytes_of_row[tile], rows[tile]) = (64, LINES as u8);
        tile += 1;
    }
    Config { palette: 1, start_row: 0, reserved: [0; 14], bytes_of_row, rows }
};

/// This thread's configured tiles; released on drop.
pub(super) struct Tiles(());

impl Tiles {
    /// Configures the tiles; `None` if [`is_available`] returns an error.
    pub(super) fn new() -> Option<Self> {
        is_available().ok()?;
        // SAFETY: the processor has tiles and the system allows them, and the configuration is valid for palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly, preserves_flags))
        };
        Some(Self(()))
    }

    /// Writes, or adds to `out`, a block of [`WIDTH`] x [`WIDTH`] sums; both panels have the same number of tiles.
    ///
    /// # Safety
    /// `out` has WIDTH rows of WIDTH elements; consecutive rows begin `stride` elements apart.
    pub(super) unsafe fn block(&self, out: *mut f32, stride: usize, [a, b]: [&[Tile]; 2], add: bool) {
        assert!(a.len() == b.len() && a.len().is_multiple_of(2) && WIDTH == 2 * LINES);
        // SAFETY: the tiles are configured as long as `self` lives. The caller guarantees `out`; each iteration reads
        // the next two tiles of both panels.
        unsafe {
            asm!(
                "test {add}, {add}",
                "jz 3f",
                "tileloadd tmm0, [{c} + {stride}]",
                "tileloadd tmm1, [{c} + {stride} + 64]",
                "tileloadd tmm2, [{lower} + {stride}]",
                "tileloadd tmm3, [{lower} + {stride} + 64]",
                "jmp 4f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "4:",
                "test {rounds}, {rounds}",
                "jz 6f",
                "5:",
                "tileloadd tmm6, [{b} + {row}]",
                "tileloadd tmm4, [{a} + {row}]",
                "tileloadd tmm7, [{b} + {row} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a} + {row} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {rounds}",
                "jnz 5b",
                "6:",
                "tilestored [{c} + {stride}], tmm0",
                "tilestored [{c} + {stride} + 64], tmm1",
                "tilestored [{lower} + {stride}], tmm2",
                "tilestored [{lower} + {stride} + 64], tmm3",
                a = inout(reg) a.as_ptr() => _,
                b = inout(reg) b.as_ptr() => _,
                rounds = inout(reg) a.len() / 2 => _,
                c = in(reg) out,
                lower = in(reg) out.wrapping_add(LINES * stride),
                stride = in(reg) stride * size_of::<f32>(),
                row = in(reg) 64usize,
                add = in(reg) usize::from(add),
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the tiles are configured, and not used after this.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
