//! Matrix unit of Intel's server cores (AMX): eight registers of sixteen rows of 64 bytes.
//!
//! The unit complements AVX-512: it computes integer sums over bytes, and all later steps equal those after
//! [`Simd::dot_bytes`](super::Simd::dot_bytes). Both methods therefore give the same bits.
//!
//! The compiler neither allocates these registers nor has stable intrinsics, so this module uses assembly.
//!
//! [`Tiles`] are configured for groups of activations and codes, [`gemm`] for digits of integers,
//! [`mod@bf16`] and [`mod@attention`] for floats.

pub(crate) mod attention;
pub(crate) mod bf16;
pub(crate) mod gemm;

use std::{
    arch::{asm, x86_64::__cpuid_count},
    marker::PhantomData,
    sync::LazyLock,
};

/// Products per round of [`Tiles::repeat`]: two tiles of groups.
pub(crate) const PRODUCTS_OF_A_ROUND: usize = 2 * 16 * 16 * 32;

/// True if this process may use the unit. Linux saves its registers only for processes that request it first.
pub(crate) fn is_granted() -> bool {
    const TILES_AND_BYTES: u32 = 1 << 24 | 1 << 25;
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    if __cpuid_count(7, 0).edx & TILES_AND_BYTES != TILES_AND_BYTES {
        return false;
    }
    let mut result = ARCH_PRCTL;
    // SAFETY: the system call touches no memory of this process.
    unsafe {
        asm!("syscall", inlateout("rax") result, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

/// True if the unit multiplies bf16.
// The processor is asked once: under a hypervisor each question takes microseconds.
pub(crate) fn multiplies_bf16() -> bool {
    static MULTIPLIES: LazyLock<bool> = LazyLock::new(|| __cpuid_count(7, 0).edx & 1 << 22 != 0);
    *MULTIPLIES
}

/// Prefetches the cache line at `at`, which need not exist, to write it.
#[inline(always)]
pub(crate) fn prefetch_to_write(at: *const u8) {
    // SAFETY: a prefetch never faults, and every processor with the unit has this one.
    unsafe { asm!("prefetchw [{at}]", at = in(reg) at, options(nostack, readonly, preserves_flags)) };
}

/// Bytes of a row of a full register.
const ROW_BYTES: usize = 64;

/// Configuration of the registers, as `ldtilecfg` reads it.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    first_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Returns the configuration of eight registers, each with its rows and bytes per row.
    const fn of(row_bytes: [u16; 8], rows: [u8; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = row_bytes;
        let row_bytes = [a, b, c, d, e, f, g, h, 0, 0, 0, 0, 0, 0, 0, 0];
        let [a, b, c, d, e, f, g, h] = rows;
        let rows = [a, b, c, d, e, f, g, h, 0, 0, 0, 0, 0, 0, 0, 0];
        Self { palette: 1, first_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

/// The tile registers of this thread; dropping it releases them.
struct Registers(PhantomData<*mut ()>);

impl Registers {
    /// # Safety
    /// [`is_granted`] was true, this thread has no other `Registers`, and the unit supports the layout.
    #[inline(always)]
    unsafe fn lay_out(layout: &TileConfig) -> Self {
        // SAFETY: the caller upholds this function's contract.
        unsafe { asm!("ldtilecfg [{}]", in(reg) layout, options(nostack, readonly)) };
        Self(PhantomData)
    }
}

impl Drop for Registers {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: no other code of this thread uses the registers. The kernel need not save released registers on a
        // thread switch.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Loads a register; rows are `stride` bytes apart.
///
/// # Safety
/// The registers are configured, and `from` is valid for the rows of this register.
#[inline(always)]
unsafe fn load<const TILE: usize>(from: *const u8, stride: usize) {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        asm!(
            "tileloadd tmm{tile}, [{from} + {row}]",
            tile = const TILE, from = in(reg) from, row = in(reg) stride, options(nostack, readonly),
        );
    }
}

/// Stores a register as [`load`] loads it.
///
/// # Safety
/// The registers are configured, and `to` is valid for the rows of this register.
#[inline(always)]
unsafe fn store<const TILE: usize>(to: *mut f32, stride: usize) {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        asm!(
            "tilestored [{to} + {row}], tmm{tile}",
            tile = const TILE, to = in(reg) to, row = in(reg) stride, options(nostack),
        );
    }
}

/// The tile registers, configured for sixteen rows of activations and the sixteen of a panel:
///
/// ```text
/// 0, 1   sums, [16, 16] integers
/// 2, 3   activations of a group, [16, 32] bytes       4, 5   codes of a group, [32 / 4, 16 x 4] bytes
/// 6      activations of half a group, [16, 16] bytes     7   codes of half a group, [16 / 4, 16 x 4] bytes
/// ```
///
/// The tile registers belong to this thread until `drop` releases them.
pub(crate) struct Tiles(Registers);

static GROUPS: TileConfig = TileConfig::of([64, 64, 32, 32, 64, 64, 16, 64], [16, 16, 16, 16, 8, 8, 16, 4]);

impl Tiles {
    /// Configures this thread's registers, which takes as long as five groups.
    ///
    /// # Safety
    /// [`is_granted`] was true, and this thread has no other `Tiles`.
    #[inline(always)]
    pub(crate) unsafe fn lay_out() -> Self {
        // SAFETY: the caller upholds this function's contract.
        Self(unsafe { Registers::lay_out(&GROUPS) })
    }

    /// Computes exact products of a group: `sums[m][lane] = sum over k of x[m][k] * codes[k / 4][lane][k %
    /// 4]`.
    ///
    /// # Safety
    /// `x` and `codes` are valid for 512 bytes each, `sums` for 256 integers.
    #[inline(always)]
    pub(crate) unsafe fn dot_group(&self, x: *const i8, codes: *const u8, sums: *mut i32) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm2, [{x} + {x_row}]",
                "tileloadd tmm4, [{codes} + {row}]",
                "tdpbsud tmm0, tmm2, tmm4",
                "tilestored [{sums} + {row}], tmm0",
                x = in(reg) x, codes = in(reg) codes, sums = in(reg) sums, x_row = in(reg) 32usize,
                row = in(reg) 64usize, options(nostack),
            );
        }
    }

    /// Computes the products of both halves of a group in sequence.
    ///
    /// # Safety
    /// The conditions of [`Tiles::dot_group`] hold, with room for 512 integers.
    #[inline(always)]
    pub(crate) unsafe fn dot_halves(&self, x: *const i8, codes: *const u8, sums: *mut i32) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm6, [{x} + {x_row}]",
                "tileloadd tmm7, [{codes} + {row}]",
                "tdpbsud tmm0, tmm6, tmm7",
                "tilestored [{sums} + {row}], tmm0",
                "tilezero tmm1",
                "tileloadd tmm6, [{x} + {x_row} + 16]",
                "tileloadd tmm7, [{codes} + {row} + 256]",
                "tdpbsud tmm1, tmm6, tmm7",
                "tilestored [{sums} + {row} + 1024], tmm1",
                x = in(reg) x, codes = in(reg) codes, sums = in(reg) sums, x_row = in(reg) 32usize,
                row = in(reg) 64usize, options(nostack),
            );
        }
    }

    /// Repeats the products of the register contents for `rounds` rounds, to measure the unit's rate.
    pub(crate) fn repeat(&self, rounds: usize) {
        // SAFETY: the registers are configured, and any contents are valid integers.
        unsafe {
            asm!(
                "2:",
                "tdpbsud tmm0, tmm2, tmm4",
                "tdpbsud tmm1, tmm3, tmm5",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds => _, options(nostack, nomem),
            );
        }
    }
}
