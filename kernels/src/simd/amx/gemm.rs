//! Products of numbers by their digits, through registers that are all of sixteen rows of 64 bytes.

use std::arch::asm;

use super::{Registers, TileConfig};

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
/// 0 to 5   sums of products whose digits' places add up to 0 to 5, or to 6 and 7, [16, 16] whole numbers
/// 6        a digit of weights        7   a digit of rows
/// ```
///
/// Of both, one is on the left: `[16, 64]` bytes; the other on the right, `[64 / 4, 16 x 4]` bytes.
///
/// They are this thread's, until they are given back: when this is dropped.
pub(crate) struct AmxGemm(Registers);

static SQUARES: TileConfig = TileConfig::of([64; 8], [16; 8]);

impl AmxGemm {
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
    /// `W`, and of `X` places. It is exact as long as it is below 2^31. It is the turn of `meanwhile` at least `depths` times.
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
        meanwhile: &mut impl Interleave,
    ) {
        // SAFETY: the caller's.
        unsafe {
            self.places::<X, W, 0, LEFT>(x, w, depths, sums, meanwhile);
            if X > PLACES {
                let sums = sums.add(PLACES * TILE_SUMS);
                self.places::<X, W, PLACES, LEFT>(x, w, depths, sums, meanwhile);
            }
        }
    }

    /// The sums of six places from `FIRST` on, as far as there are so many.
    #[inline(always)]
    unsafe fn places<const X: usize, const W: usize, const FIRST: usize, const LEFT: bool>(
        &self,
        mut x: *const u8,
        mut w: *const u8,
        depths: usize,
        sums: *mut i32,
        meanwhile: &mut impl Interleave,
    ) {
        // SAFETY: the caller's. What is stored too early is stored again.
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

/// What is done while the unit is busy, a bit at each turn. No closure: those are not always compiled for the set.
pub(crate) trait Interleave {
    /// Does a bit of it. Implementations are `#[inline(always)]`.
    fn step(&mut self);
}

/// Places that are summed together.
const PLACES: usize = 6;

/// Depths after which sums are stored although they go on: a unit that has stored nothing for 700 ns, as long as eight of them, takes
/// 260 ns for the next time, and nobody knows why.
const AWAKE: usize = 4;

/// Products of digit `I` of weights, if they have so many, with all of `X` digits of rows that it comes to these places with.
#[inline(always)]
unsafe fn meet<const X: usize, const I: usize, const W: usize, const FIRST: usize, const LEFT: bool>(
    x: *const u8,
    w: *const u8,
) {
    if I >= W {
        return;
    }
    // SAFETY: the caller's.
    unsafe {
        load::<6>(w.add(I * TILE_BYTES));
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

/// The product of the digit of weights that was loaded, the `I`th, with the `J`th of rows, if it comes to these places.
#[inline(always)]
unsafe fn product<const X: usize, const I: usize, const J: usize, const FIRST: usize, const LEFT: bool>(
    x: *const u8,
) {
    if I + J < FIRST || I + J >= FIRST + PLACES || I + J >= X {
        return;
    }
    // SAFETY: the caller's; the registers are laid out, and whatever they hold are whole numbers.
    unsafe {
        load::<7>(x.add(J * TILE_BYTES));
        asm!(
            "tdpbssd tmm{sum}, tmm{left}, tmm{right}",
            sum = const (I + J + PLACES - FIRST) % PLACES,
            left = const if LEFT { 6 } else { 7 },
            right = const if LEFT { 7 } else { 6 },
            options(nostack, nomem),
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

/// Stores the sums of the `TILE`th place from `FIRST` on, if there are so many.
#[inline(always)]
unsafe fn store<const TILE: usize, const X: usize, const FIRST: usize>(sums: *mut i32) {
    if FIRST + TILE >= X {
        return;
    }
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tilestored [{sums} + {row}], tmm{tile}",
            tile = const TILE, sums = in(reg) sums.add(TILE * TILE_SUMS), row = in(reg) 64usize, options(nostack),
        );
    }
}
