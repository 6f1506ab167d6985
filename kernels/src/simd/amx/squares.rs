//! Products of numbers by their digits, through registers that are all of sixteen rows of 64 bytes.

use std::{arch::asm, marker::PhantomData};

use super::{Layout, give_back};

/// Digits of a number: bytes with signs, the lowest first.
pub(crate) const DIGITS: usize = 8;
/// Digits that weights have at most.
pub(crate) const WEIGHT_DIGITS: usize = 4;
/// Elements of a row of bytes in a tile.
pub(crate) const DEPTH: usize = 64;
/// Bytes of a tile.
pub(crate) const TILE_BYTES: usize = 16 * DEPTH;
/// Numbers of a tile of sums.
pub(crate) const TILE_SUMS: usize = 256;

/// The registers, all of sixteen rows of 64 bytes, for products of numbers by their digits:
///
/// ```text
/// 0 to 3   sums of products whose digits' places add up to 0 to 3, or 4 to 7, [16, 16] whole numbers
/// 4, 5     a digit of weights        6, 7   a digit of rows
/// ```
///
/// Of both, one is on the left: `[16, 64]` bytes; the other on the right, `[64 / 4, 16 x 4]` bytes.
///
/// They are this thread's, until they are given back: when this is dropped.
pub(crate) struct Squares(PhantomData<*mut ()>);

static SQUARES: Layout = Layout {
    palette: 1,
    first_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl Squares {
    /// Lays this thread's registers out.
    ///
    /// # Safety
    ///
    /// As [`Tiles::lay_out`].
    #[inline(always)]
    pub(crate) unsafe fn lay_out() -> Self {
        // SAFETY: the layout is one that the unit has.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &SQUARES, options(nostack, readonly)) };
        Self(PhantomData)
    }

    /// Sums of products of digits, by the place they stand for: `sums[p][m][n]` is that over `i + j = p` and all `k` of
    /// `x[j][m][k] w[i][k][n]`, or where weights are on the `LEFT` of `w[i][m][k] x[j][k][n]`; of rows of eight digits and weights of
    /// `W`. It is exact as long as it is below 2^31.
    ///
    /// # Safety
    ///
    /// `depths` times [`DIGITS`] tiles lie at `x`, and as many times [`WEIGHT_DIGITS`] at `w`; there is room for [`DIGITS`] times
    /// [`TILE_SUMS`] numbers at `sums`.
    #[inline(always)]
    pub(crate) unsafe fn multiply<const W: usize, const LEFT: bool>(
        &self,
        x: *const u8,
        w: *const u8,
        depths: usize,
        sums: *mut i32,
    ) {
        // SAFETY: the caller's.
        unsafe {
            self.half::<W, 0, LEFT>(x, w, depths, sums);
            self.half::<W, 4, LEFT>(x, w, depths, sums.add(4 * TILE_SUMS));
        }
    }

    /// The sums of the four places from `FIRST` on.
    #[inline(always)]
    unsafe fn half<const W: usize, const FIRST: usize, const LEFT: bool>(
        &self,
        mut x: *const u8,
        mut w: *const u8,
        depths: usize,
        sums: *mut i32,
    ) {
        // SAFETY: the caller's.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
            for _ in 0..depths {
                digit::<0, W, FIRST, LEFT>(x, w);
                digit::<1, W, FIRST, LEFT>(x, w);
                digit::<2, W, FIRST, LEFT>(x, w);
                digit::<3, W, FIRST, LEFT>(x, w);
                digit::<4, W, FIRST, LEFT>(x, w);
                digit::<5, W, FIRST, LEFT>(x, w);
                digit::<6, W, FIRST, LEFT>(x, w);
                digit::<7, W, FIRST, LEFT>(x, w);
                x = x.add(DIGITS * TILE_BYTES);
                w = w.add(WEIGHT_DIGITS * TILE_BYTES);
            }
            asm!(
                "tilestored [{sums} + {row}], tmm0",
                "tilestored [{sums} + {row} + 1024], tmm1",
                "tilestored [{sums} + {row} + 2048], tmm2",
                "tilestored [{sums} + {row} + 3072], tmm3",
                sums = in(reg) sums, row = in(reg) 64usize, options(nostack),
            );
        }
    }
}

impl Drop for Squares {
    #[inline(always)]
    fn drop(&mut self) {
        give_back();
    }
}

/// Products of digit `X` of rows with those of `W` digits of weights that come to the four places from `FIRST` on.
#[inline(always)]
unsafe fn digit<const X: usize, const W: usize, const FIRST: usize, const LEFT: bool>(
    x: *const u8,
    w: *const u8,
) {
    if X + W <= FIRST || X >= FIRST + 4 {
        return;
    }
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tileloadd tmm{x}, [{from} + {row}]",
            x = const 6 + X % 2, from = in(reg) x.add(X * TILE_BYTES), row = in(reg) 64usize,
            options(nostack, readonly),
        );
        product::<X, 0, W, FIRST, LEFT>(w);
        product::<X, 1, W, FIRST, LEFT>(w);
        product::<X, 2, W, FIRST, LEFT>(w);
        product::<X, 3, W, FIRST, LEFT>(w);
    }
}

/// The product of the digit of rows that was loaded with digit `I` of weights, if there is one and it comes to these places.
#[inline(always)]
unsafe fn product<const X: usize, const I: usize, const W: usize, const FIRST: usize, const LEFT: bool>(
    w: *const u8,
) {
    if I >= W || X + I < FIRST || X + I >= FIRST + 4 {
        return;
    }
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tileloadd tmm{w}, [{from} + {row}]",
            "tdpbssd tmm{sum}, tmm{left}, tmm{right}",
            w = const 4 + I % 2, sum = const (X + I) % 4,
            left = const if LEFT { 4 + I % 2 } else { 6 + X % 2 },
            right = const if LEFT { 6 + X % 2 } else { 4 + I % 2 },
            from = in(reg) w.add(I * TILE_BYTES), row = in(reg) 64usize, options(nostack, readonly),
        );
    }
}
