//! Digit-wise products of integers, with all registers of sixteen rows of 64 bytes.

use std::arch::asm;

use super::{ROW_BYTES, Registers, TileConfig, load};

/// Maximum digits of an integer: signed bytes, the lowest first.
pub(crate) const MAX_DIGITS: usize = 8;
/// Maximum digits of a weight.
pub(crate) const WEIGHT_DIGITS: usize = 4;
/// Elements of a row of bytes in a tile.
pub(crate) const DEPTH: usize = 64;
pub(crate) const TILE_BYTES: usize = 16 * DEPTH;
pub(crate) const TILE_SUMS: usize = 256;

/// The registers, all of sixteen rows of 64 bytes, for digit-wise products of integers:
///
/// ```text
/// 0 to 5   sums of products whose digit positions add up to 0 to 5, or to 6 and 7, [16, 16] integers
/// 6        a digit of weights        7   a digit of rows
/// ```
///
/// One digit is the left operand, `[16, 64]` bytes, the other the right, `[64 / 4, 16 x 4]` bytes.
///
/// The tile registers belong to this thread until `drop` releases them.
pub(crate) struct AmxGemm(Registers);

static SQUARES: TileConfig = TileConfig::of([64; 8], [16; 8]);

impl AmxGemm {
    /// Configures this thread's registers.
    ///
    /// # Safety
    /// The conditions of [`Tiles::lay_out`](super::Tiles::lay_out) hold.
    #[inline(always)]
    pub(crate) unsafe fn lay_out() -> Self {
        // SAFETY: the caller upholds this function's contract.
        Self(unsafe { Registers::lay_out(&SQUARES) })
    }

    /// Sums products of digits by position: `sums[p][m][n]` is the sum over `i + j = p` and all `k` of
    /// `x[j][m][k] w[i][k][n]`, or of `w[i][m][k] x[j][k][n]` if weights are on the `LEFT`. Rows have `X`
    /// digits, weights `W`, and there are `X` positions. Sums below 2^31 are exact. Calls `meanwhile` at
    /// least `depths` times.
    ///
    /// # Safety
    /// `x` points to `depths` times `X` tiles, `w` to `depths` times [`WEIGHT_DIGITS`]. `sums` has room for
    /// [`MAX_DIGITS`] times [`TILE_SUMS`] integers.
    #[inline(always)]
    pub(crate) unsafe fn multiply<const X: usize, const W: usize, const LEFT: bool>(
        &self,
        x: *const u8,
        w: *const u8,
        depths: usize,
        sums: *mut i32,
        meanwhile: &mut impl Interleave,
    ) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            self.places::<X, W, 0, LEFT>(x, w, depths, sums, meanwhile);
            if X > PLACES {
                let sums = sums.add(PLACES * TILE_SUMS);
                self.places::<X, W, PLACES, LEFT>(x, w, depths, sums, meanwhile);
            }
        }
    }

    /// Computes the sums of up to six positions from `FIRST` on.
    #[inline(always)]
    unsafe fn places<const X: usize, const W: usize, const FIRST: usize, const LEFT: bool>(
        &self,
        mut x: *const u8,
        mut w: *const u8,
        depths: usize,
        sums: *mut i32,
        meanwhile: &mut impl Interleave,
    ) {
        // SAFETY: the caller guarantees tiles and sums. Sums stored early are stored again at the end.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tilezero tmm4",
                "tilezero tmm5",
                options(nostack, nomem),
            );
            for depth in 1..=depths {
                meet::<X, 0, W, FIRST, LEFT>(x, w);
                meet::<X, 1, W, FIRST, LEFT>(x, w);
                meet::<X, 2, W, FIRST, LEFT>(x, w);
                meet::<X, 3, W, FIRST, LEFT>(x, w);
                x = x.add(X * TILE_BYTES);
                w = w.add(WEIGHT_DIGITS * TILE_BYTES);
                if depth.is_multiple_of(AWAKE) {
                    store::<0, X, FIRST>(sums);
                }
                meanwhile.step();
            }
            store::<0, X, FIRST>(sums);
            store::<1, X, FIRST>(sums);
            store::<2, X, FIRST>(sums);
            store::<3, X, FIRST>(sums);
            store::<4, X, FIRST>(sums);
            store::<5, X, FIRST>(sums);
        }
    }
}

/// Work done while the unit is busy, one step at a time. A trait, because closures are not always compiled
/// for the set.
pub(crate) trait Interleave {
    /// Does one step. Implementations are `#[inline(always)]`.
    fn step(&mut self);
}

const PLACES: usize = 6;

/// Depths after which sums are stored early: a unit that stores nothing for 700 ns (eight depths) takes 260
/// ns for the next store. The cause is unknown.
const AWAKE: usize = 4;

/// Multiplies digit `I` of the weights, if any, by all digits of rows that contribute to these positions.
#[inline(always)]
unsafe fn meet<const X: usize, const I: usize, const W: usize, const FIRST: usize, const LEFT: bool>(
    x: *const u8,
    w: *const u8,
) {
    if I >= W {
        return;
    }
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        load::<6>(w.add(I * TILE_BYTES), ROW_BYTES);
        product::<X, I, 0, FIRST, LEFT>(x);
        product::<X, I, 1, FIRST, LEFT>(x);
        product::<X, I, 2, FIRST, LEFT>(x);
        product::<X, I, 3, FIRST, LEFT>(x);
        product::<X, I, 4, FIRST, LEFT>(x);
        product::<X, I, 5, FIRST, LEFT>(x);
        product::<X, I, 6, FIRST, LEFT>(x);
        product::<X, I, 7, FIRST, LEFT>(x);
    }
}

/// Multiplies the loaded digit `I` of the weights by digit `J` of rows, if these positions include it.
#[inline(always)]
unsafe fn product<const X: usize, const I: usize, const J: usize, const FIRST: usize, const LEFT: bool>(
    x: *const u8,
) {
    if I + J < FIRST || I + J >= FIRST + PLACES || I + J >= X {
        return;
    }
    // SAFETY: the caller guarantees the tile; the registers are configured, and any contents are valid integers.
    unsafe {
        load::<7>(x.add(J * TILE_BYTES), ROW_BYTES);
        asm!(
            "tdpbssd tmm{sum}, tmm{left}, tmm{right}",
            sum = const (I + J + PLACES - FIRST) % PLACES,
            left = const if LEFT { 6 } else { 7 },
            right = const if LEFT { 7 } else { 6 },
            options(nostack, nomem),
        );
    }
}

/// Stores the sums of position `FIRST + TILE`, if it exists.
#[inline(always)]
unsafe fn store<const TILE: usize, const X: usize, const FIRST: usize>(sums: *mut i32) {
    if FIRST + TILE >= X {
        return;
    }
    // SAFETY: the caller upholds this function's contract.
    unsafe { super::store::<TILE>(sums.add(TILE * TILE_SUMS).cast(), ROW_BYTES) };
}
