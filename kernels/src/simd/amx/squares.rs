//! Products of numbers by their digits, through registers that are all of sixteen rows of 64 bytes.

use std::arch::asm;

use super::{Layout, Registers};

/// Digits of a number at most: bytes with signs, the lowest first.
pub(crate) const MAX_DIGITS: usize = 8;
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
/// 4 to 6   up to three digits of weights        7   a digit of rows
/// ```
///
/// Of both, one is on the left: `[16, 64]` bytes; the other on the right, `[64 / 4, 16 x 4]` bytes.
///
/// They are this thread's, until they are given back: when this is dropped.
pub(crate) struct Squares(Registers);

static SQUARES: Layout = Layout::of([64; 8], [16; 8]);

impl Squares {
    /// Lays this thread's registers out.
    ///
    /// # Safety
    ///
    /// As [`Tiles::lay_out`](super::Tiles::lay_out).
    #[inline(always)]
    pub(crate) unsafe fn lay_out() -> Self {
        // SAFETY: the caller's.
        Self(unsafe { Registers::lay_out(&SQUARES) })
    }

    /// Sums of products of digits, by the place they stand for: `sums[p][m][n]` is that over `i + j = p` and all `k` of
    /// `x[j][m][k] w[i][k][n]`, or where weights are on the `LEFT` of `w[i][m][k] x[j][k][n]`; of rows of `X` digits and weights of
    /// `W`, and of `X` places. It is exact as long as it is below 2^31.
    ///
    /// # Safety
    ///
    /// `depths` times `X` tiles lie at `x`, and as many times [`WEIGHT_DIGITS`] at `w`; there is room for [`MAX_DIGITS`] times
    /// [`TILE_SUMS`] numbers at `sums`.
    #[inline(always)]
    pub(crate) unsafe fn multiply<const X: usize, const W: usize, const LEFT: bool>(
        &self,
        x: *const u8,
        w: *const u8,
        depths: usize,
        sums: *mut i32,
    ) {
        // SAFETY: the caller's.
        unsafe {
            self.half::<X, W, 0, LEFT>(x, w, depths, sums);
            self.half::<X, W, 4, LEFT>(x, w, depths, sums.add(4 * TILE_SUMS));
        }
    }

    /// The sums of the four places from `FIRST` on, as far as there are so many.
    #[inline(always)]
    unsafe fn half<const X: usize, const W: usize, const FIRST: usize, const LEFT: bool>(
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
                if W <= HELD {
                    meet::<X, 0, W, FIRST, LEFT>(x, w);
                } else if FIRST == 0 {
                    // Its last digit meets but one of the rows'.
                    meet::<X, HELD, 1, FIRST, LEFT>(x, w);
                    meet::<X, 0, HELD, FIRST, LEFT>(x, w);
                } else {
                    meet::<X, 1, HELD, FIRST, LEFT>(x, w);
                    meet::<X, 0, 1, FIRST, LEFT>(x, w);
                }
                x = x.add(X * TILE_BYTES);
                w = w.add(WEIGHT_DIGITS * TILE_BYTES);
            }
            store::<0>(sums);
            store::<1>(sums);
            if X > FIRST + 2 {
                store::<2>(sums);
                store::<3>(sums);
            }
        }
    }
}

/// The place behind the last of those from `FIRST` on that are summed together, of `digits`.
const fn end(digits: usize, first: usize) -> usize {
    if digits < first + 4 { digits } else { first + 4 }
}

/// Digits of weights that stay in registers while those of rows meet them.
const HELD: usize = 3;

/// Products of all `DIGITS` digits of rows with `COUNT` digits of weights, from digit `FROM` on, that come to the four places from `FIRST` on.
#[inline(always)]
unsafe fn meet<
    const DIGITS: usize,
    const FROM: usize,
    const COUNT: usize,
    const FIRST: usize,
    const LEFT: bool,
>(
    x: *const u8,
    w: *const u8,
) {
    // SAFETY: the caller's.
    unsafe {
        load::<4>(w.add(FROM * TILE_BYTES));
        if COUNT > 1 {
            load::<5>(w.add((FROM + 1) * TILE_BYTES));
        }
        if COUNT > 2 {
            load::<6>(w.add((FROM + 2) * TILE_BYTES));
        }
        digit::<DIGITS, 0, FROM, COUNT, FIRST, LEFT>(x);
        digit::<DIGITS, 1, FROM, COUNT, FIRST, LEFT>(x);
        digit::<DIGITS, 2, FROM, COUNT, FIRST, LEFT>(x);
        digit::<DIGITS, 3, FROM, COUNT, FIRST, LEFT>(x);
        digit::<DIGITS, 4, FROM, COUNT, FIRST, LEFT>(x);
        digit::<DIGITS, 5, FROM, COUNT, FIRST, LEFT>(x);
        digit::<DIGITS, 6, FROM, COUNT, FIRST, LEFT>(x);
        digit::<DIGITS, 7, FROM, COUNT, FIRST, LEFT>(x);
    }
}

/// Products of digit `X` of rows with those digits of weights.
#[inline(always)]
unsafe fn digit<
    const DIGITS: usize,
    const X: usize,
    const FROM: usize,
    const COUNT: usize,
    const FIRST: usize,
    const LEFT: bool,
>(
    x: *const u8,
) {
    if X >= DIGITS || X + FROM + COUNT <= FIRST || X + FROM >= end(DIGITS, FIRST) {
        return;
    }
    // SAFETY: the caller's.
    unsafe {
        load::<7>(x.add(X * TILE_BYTES));
        product::<DIGITS, X, 0, FROM, COUNT, FIRST, LEFT>();
        product::<DIGITS, X, 1, FROM, COUNT, FIRST, LEFT>();
        product::<DIGITS, X, 2, FROM, COUNT, FIRST, LEFT>();
    }
}

/// Stores the `TILE`th sums.
#[inline(always)]
unsafe fn store<const TILE: usize>(sums: *mut i32) {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tilestored [{sums} + {row}], tmm{tile}",
            tile = const TILE, sums = in(reg) sums.add(TILE * TILE_SUMS), row = in(reg) 64usize, options(nostack),
        );
    }
}

#[inline(always)]
unsafe fn load<const TILE: usize>(from: *const u8) {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tileloadd tmm{tile}, [{from} + {row}]",
            tile = const TILE, from = in(reg) from, row = in(reg) 64usize, options(nostack, readonly),
        );
    }
}

/// The product of the digit of rows that was loaded with the `I`th of those that are held, if there is one and it comes to these
/// places.
#[inline(always)]
unsafe fn product<
    const DIGITS: usize,
    const X: usize,
    const I: usize,
    const FROM: usize,
    const COUNT: usize,
    const FIRST: usize,
    const LEFT: bool,
>() {
    if I >= COUNT || X + FROM + I < FIRST || X + FROM + I >= end(DIGITS, FIRST) {
        return;
    }
    // SAFETY: the registers are laid out; whatever they hold are whole numbers.
    unsafe {
        asm!(
            "tdpbssd tmm{sum}, tmm{left}, tmm{right}",
            sum = const (X + FROM + I) % 4,
            left = const if LEFT { 4 + I } else { 7 },
            right = const if LEFT { 7 } else { 4 + I },
            options(nostack, nomem),
        );
    }
}
