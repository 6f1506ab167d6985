//! Products of bf16 with sums in 32 bits, on tiles of rows by sixteen outputs.

use std::arch::asm;

use super::{ROW_BYTES, Registers, TileConfig, load, store};

/// Bytes of a tile of weights: sixteen pairs of columns by sixteen outputs.
pub(crate) const TILE_BYTES: usize = 1024;

/// The registers, for rows of 64 bytes:
///
/// ```text
/// 0, 1   sums of the first tile of rows with two panels, [rows, 16] floats       2, 3   of the second
/// 4, 5   activations of two tiles of rows, [rows, 32] bf16      6, 7   weights of two panels, [16, 16 x 2]
/// ```
///
/// The tile registers belong to this thread until `drop` releases them.
pub(crate) struct AmxBf16(Registers);

impl AmxBf16 {
    /// Configures this thread's registers for tiles of `rows` rows, 1 to 16.
    ///
    /// # Safety
    /// The unit multiplies bf16, and the conditions of [`Tiles::lay_out`](super::Tiles::lay_out) hold.
    #[inline(always)]
    pub(crate) unsafe fn lay_out(rows: usize) -> Self {
        let rows = rows as u8;
        let layout = TileConfig::of([64; 8], [rows, rows, rows, rows, rows, rows, 16, 16]);
        // SAFETY: the caller upholds this function's contract.
        Self(unsafe { Registers::lay_out(&layout) })
    }

    /// Sets the sums of `R` tiles of rows with `P` panels to zero.
    #[inline(always)]
    pub(crate) fn clear<const R: usize, const P: usize>(&self) {
        zero::<0>();
        if P == 2 {
            zero::<1>();
        }
        if R == 2 {
            zero::<2>();
        }
        if R == 2 && P == 2 {
            zero::<3>();
        }
    }

    /// Loads the sums of `R` tiles of rows with `P` panels; `from` has four tiles of 256 floats.
    ///
    /// # Safety
    /// `from` is valid for these tiles.
    #[inline(always)]
    pub(crate) unsafe fn load_sums<const R: usize, const P: usize>(&self, from: *const f32) {
        let from = from.cast::<u8>();
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            load::<0>(from, ROW_BYTES);
            if P == 2 {
                load::<1>(from.add(TILE_BYTES), ROW_BYTES);
            }
            if R == 2 {
                load::<2>(from.add(2 * TILE_BYTES), ROW_BYTES);
            }
            if R == 2 && P == 2 {
                load::<3>(from.add(3 * TILE_BYTES), ROW_BYTES);
            }
        }
    }

    /// Stores the sums as [`AmxBf16::load_sums`] loads them.
    ///
    /// # Safety
    /// `to` is valid for these tiles.
    #[inline(always)]
    pub(crate) unsafe fn store_sums<const R: usize, const P: usize>(&self, to: *mut f32) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            store::<0>(to, ROW_BYTES);
            if P == 2 {
                store::<1>(to.add(256), ROW_BYTES);
            }
            if R == 2 {
                store::<2>(to.add(2 * 256), ROW_BYTES);
            }
            if R == 2 && P == 2 {
                store::<3>(to.add(3 * 256), ROW_BYTES);
            }
        }
    }

    /// Adds the products of 32 columns of `R` tiles of rows with `P` panels to the sums:
    ///
    /// ```text
    /// e = 0; o = 0; for k in 0..16 { e = fma(x[2k], w[2k], e); o = fma(x[2k+1], w[2k+1], o) }
    /// sum = sum + (e + o)      in 32 bits, to nearest even, denormals taken and given as zero
    /// ```
    ///
    /// # Safety
    /// The first `R` pointers of `x` and the first `P` of `w` are valid for a tile.
    #[inline(always)]
    pub(crate) unsafe fn add_products<const R: usize, const P: usize>(
        &self,
        x: [*const u8; 2],
        w: [*const u8; 2],
    ) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            load::<4>(x[0], ROW_BYTES);
            load::<6>(w[0], ROW_BYTES);
            add::<0, 4, 6>();
            if R == 2 {
                load::<5>(x[1], ROW_BYTES);
                add::<2, 5, 6>();
            }
            if P == 2 {
                load::<7>(w[1], ROW_BYTES);
                add::<1, 4, 7>();
            }
            if R == 2 && P == 2 {
                add::<3, 5, 7>();
            }
        }
    }
}

#[inline(always)]
pub(super) fn zero<const TILE: usize>() {
    // SAFETY: the caller has laid the registers out, so the registers are configured.
    unsafe { asm!("tilezero tmm{tile}", tile = const TILE, options(nostack, nomem)) };
}

#[inline(always)]
pub(super) fn add<const SUM: usize, const X: usize, const W: usize>() {
    // SAFETY: the caller has laid the registers out, so the registers are configured, and any contents are valid floats.
    unsafe {
        asm!(
            "tdpbf16ps tmm{sum}, tmm{x}, tmm{w}",
            sum = const SUM, x = const X, w = const W, options(nostack, nomem),
        );
    }
}
