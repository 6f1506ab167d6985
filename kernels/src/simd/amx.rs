//! The matrix unit of Intel's server cores (AMX): eight registers of sixteen rows of 64 bytes.
//!
//! Beside AVX-512, not instead of it: sums over bytes come from here as whole numbers, and everything else is done with them
//! as after [`Simd::dot_bytes`](super::Simd::dot_bytes). So both ways give the same bits.
//!
//! The compiler keeps nothing in these registers, and has no stable intrinsics for them: here is assembly.
//!
//! [`Tiles`] are laid out for groups of activations and codes, [`gemm`] for digits of any numbers.

pub(crate) mod gemm;

use std::{
    arch::{asm, x86_64::__cpuid_count},
    marker::PhantomData,
};

/// Products of a round of [`Tiles::repeat`]: two tiles, of groups.
pub(crate) const PRODUCTS_OF_A_ROUND: usize = 2 * 16 * 16 * 32;

/// Whether this process may use the unit. Linux saves its registers for those alone who ask, before the first use.
pub(crate) fn is_granted() -> bool {
    const TILES_AND_BYTES: u32 = 1 << 24 | 1 << 25;
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    if __cpuid_count(7, 0).edx & TILES_AND_BYTES != TILES_AND_BYTES {
        return false;
    }
    let mut result = ARCH_PRCTL;
    // SAFETY: a system call that touches no memory of this process.
    unsafe {
        asm!("syscall", inlateout("rax") result, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

/// The layout of the registers, as `ldtilecfg` reads it.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    first_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Of eight registers, each of so many rows of so many bytes.
    const fn of(row_bytes: [u16; 8], rows: [u8; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = row_bytes;
        let row_bytes = [a, b, c, d, e, f, g, h, 0, 0, 0, 0, 0, 0, 0, 0];
        let [a, b, c, d, e, f, g, h] = rows;
        let rows = [a, b, c, d, e, f, g, h, 0, 0, 0, 0, 0, 0, 0, 0];
        Self { palette: 1, first_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

/// This thread's registers, until they are given back: when this is dropped.
struct Registers(PhantomData<*mut ()>);

impl Registers {
    /// # Safety
    ///
    /// [`is_granted`] was true, no others of this thread are left, and the unit has such registers.
    #[inline(always)]
    unsafe fn lay_out(layout: &TileConfig) -> Self {
        // SAFETY: the caller's.
        unsafe { asm!("ldtilecfg [{}]", in(reg) layout, options(nostack, readonly)) };
        Self(PhantomData)
    }
}

impl Drop for Registers {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: nobody else uses them. Registers that are empty need not be saved when threads change.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// The registers, laid out for sixteen rows of activations and the sixteen of a panel:
///
/// ```text
/// 0, 1   sums, [16, 16] whole numbers
/// 2, 3   activations of a group, [16, 32] bytes       4, 5   codes of a group, [32 / 4, 16 x 4] bytes
/// 6      activations of half a group, [16, 16] bytes     7   codes of half a group, [16 / 4, 16 x 4] bytes
/// ```
///
/// They are this thread's, until they are given back: when this is dropped.
pub(crate) struct Tiles(Registers);

static GROUPS: TileConfig = TileConfig::of([64, 64, 32, 32, 64, 64, 16, 64], [16, 16, 16, 16, 8, 8, 16, 4]);

impl Tiles {
    /// Lays this thread's registers out, which takes as long as five groups.
    ///
    /// # Safety
    ///
    /// [`is_granted`] was true, and no other `Tiles` of this thread are left.
    #[inline(always)]
    pub(crate) unsafe fn lay_out() -> Self {
        // SAFETY: the caller's.
        Self(unsafe { Registers::lay_out(&GROUPS) })
    }

    /// The products of a group: `sums[m][lane] = sum over k of x[m][k] * codes[k / 4][lane][k % 4]`, exact.
    ///
    /// # Safety
    ///
    /// 512 bytes lie at `x`, and at `codes`; there is room for 256 numbers at `sums`.
    #[inline(always)]
    pub(crate) unsafe fn dot_group(&self, x: *const i8, codes: *const u8, sums: *mut i32) {
        // SAFETY: the caller's.
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

    /// The same of each half of a group, one after the other.
    ///
    /// # Safety
    ///
    /// As [`Tiles::dot_group`], with room for 512 numbers.
    #[inline(always)]
    pub(crate) unsafe fn dot_halves(&self, x: *const i8, codes: *const u8, sums: *mut i32) {
        // SAFETY: the caller's.
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

    /// Products of what lies in the registers, for so many rounds.
    pub(crate) fn repeat(&self, rounds: usize) {
        // SAFETY: registers that are laid out; whatever they hold are whole numbers.
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
