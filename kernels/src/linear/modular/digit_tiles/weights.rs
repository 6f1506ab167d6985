//! Weights as whole numbers, cut into tiles of digits on a desk.

use super::rows::SIDE;
use crate::{
    activations::GROUP,
    simd::{
        LANES,
        amx::gemm::{AmxGemm, DEPTH, Interleave, MAX_DIGITS, TILE_SUMS, WEIGHT_DIGITS},
    },
};

/// Stretches of elements that lie on the desk at once: 96 KB of their digits.
pub(super) const DEPTHS: usize = 24;

/// A digit of 64 elements of sixteen columns: `[64 / 4, 16]` of four bytes, the first in the lowest bits, or `[16, 64 / 4]`.
type WeightTile = [[u32; LANES]; DEPTH / 4];
/// All digits of them.
type DigitTile = [WeightTile; WEIGHT_DIGITS];
/// Sums of products, by places.
type DigitSums = [[i32; TILE_SUMS]; MAX_DIGITS];
/// Whole numbers of 64 elements of sixteen columns, or of sixteen elements of a group of columns.
pub(super) type IntTile = [[i32; LANES]; DEPTH];

/// Where weights and sums lie meanwhile.
#[repr(C, align(64))]
pub(super) struct DigitScratch {
    weights: [DigitTile; DEPTHS],
    pub(super) whole: IntTile,
    /// Those of the last product but one, and of the last, which is the `last`th.
    sums: [DigitSums; 2],
    last: usize,
    /// Bits that the third digits of weights have, or any of them, and the fourth ones.
    upper: [[u32; LANES]; 2],
}

impl DigitScratch {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            weights: [[[[0; LANES]; DEPTH / 4]; WEIGHT_DIGITS]; DEPTHS],
            whole: [[0; LANES]; DEPTH],
            sums: [[[0; TILE_SUMS]; MAX_DIGITS]; 2],
            last: 0,
            upper: [[0; LANES]; 2],
        }
    }

    /// Forgets how large weights were.
    #[inline(always)]
    pub(super) fn clear(&mut self) {
        self.upper = [[0; LANES]; 2];
    }

    /// Cuts the whole numbers on the desk, a lane being a column: they are the right side of a product.
    #[inline(always)]
    pub(super) fn cut(&mut self, depth: usize) {
        let Self { weights, whole, upper, .. } = self;
        let [first, second, third, fourth] = &mut weights[depth];
        let mut bits = *upper;
        for row in 0..DEPTH / 4 {
            // Of its own: otherwise it is looked at each time whether places overlap.
            let mut digits = [[0; LANES]; WEIGHT_DIGITS];
            for lane in 0..LANES {
                let at = |i: usize| with_signs(whole[4 * row + i][lane]);
                let [a, b, c, d] = transposed([at(0), at(1), at(2), at(3)]);
                (digits[0][lane], digits[1][lane], digits[2][lane], digits[3][lane]) = (a, b, c, d);
                bits[0][lane] |= c;
                bits[1][lane] |= d;
            }
            [first[row], second[row], third[row], fourth[row]] = digits;
        }
        *upper = bits;
    }

    /// Cuts whole numbers on the desk, a lane being an element: those of a group of columns and of the `panel`th sixteen elements.
    /// They are the left side of two products, of each half of the group, whose weights lie on a half of the desk.
    #[inline(always)]
    pub(super) fn cut_across(&mut self, panel: usize) {
        let Self { weights, whole, upper, .. } = self;
        let (depth, at) = (panel / (DEPTH / LANES), panel % (DEPTH / LANES) * LANES / 4);
        for (column, elements) in whole[..GROUP].iter().enumerate() {
            let mut elements = *elements;
            for lane in 0..LANES {
                elements[lane] = with_signs(elements[lane]).cast_signed();
                upper[0][lane] |= elements[lane].cast_unsigned() >> 16 & 0xff;
                upper[1][lane] |= elements[lane].cast_unsigned() >> 24;
            }
            for (digit, tile) in weights[column / LANES * (DEPTHS / 2) + depth].iter_mut().enumerate() {
                let mut bytes = [0; LANES];
                for lane in 0..LANES {
                    bytes[lane] = (elements[lane] >> (8 * digit)) as u8;
                }
                for (four, bytes) in
                    tile[column % LANES][at..at + LANES / 4].iter_mut().zip(bytes.as_chunks().0)
                {
                    *four = u32::from_le_bytes(*bytes);
                }
            }
        }
    }

    /// Multiplies sixteen rows of `B` digits, whose tiles begin at `x`, with `depths` stretches of weights from the `first` on; these are
    /// on the `LEFT` or not, as they were cut. Meanwhile the rows of the last product's sums are given to `to`.
    ///
    /// # Safety
    ///
    /// The tiles exist.
    #[inline(always)]
    pub(super) unsafe fn multiply<const B: usize, const LEFT: bool>(
        &mut self,
        unit: &AmxGemm,
        x: *const u8,
        first: usize,
        depths: usize,
        to: &impl RowSink,
    ) {
        assert!(first + depths <= DEPTHS, "stretches lie on the desk");
        let Self { weights, upper, sums: [even, odd], last, .. } = self;
        let (done, sums) = if *last == 0 { (&*even, odd) } else { (&*odd, even) };
        *last ^= 1;
        let (w, sums) = (weights[first..].as_ptr().cast(), sums.as_mut_ptr().cast());
        let meanwhile = &mut RowDrain::<_, B> { done, row: 0, at_once: SIDE.div_ceil(depths), to };
        // SAFETY: the caller's, and all the rest lies on the desk. Sums of 1536 elements are below 2^27.
        unsafe {
            match upper.map(|bits| bits != [0; LANES]) {
                [_, true] => unit.multiply::<B, 4, LEFT>(x, w, depths, sums, meanwhile),
                [true, false] => unit.multiply::<B, 3, LEFT>(x, w, depths, sums, meanwhile),
                [false, false] => unit.multiply::<B, 2, LEFT>(x, w, depths, sums, meanwhile),
            }
        }
    }

    /// Gives the rows of the last product's sums to `to`.
    #[inline(always)]
    pub(super) fn drain_rows<const B: usize>(&self, to: &impl RowSink) {
        RowDrain::<_, B> { done: &self.sums[self.last], row: 0, at_once: SIDE, to }.step();
    }
}

/// Whoever takes rows of sums. No closure: those are not always compiled for the set.
pub(super) trait RowSink {
    /// Takes row `row` of a product. Implementations are `#[inline(always)]`.
    fn write_row(&self, row: usize, words: [u64; LANES]);
}

/// Sums of `B` places on their way, some rows at a time.
struct RowDrain<'a, T, const B: usize> {
    done: &'a DigitSums,
    row: usize,
    at_once: usize,
    to: &'a T,
}

impl<T: RowSink, const B: usize> Interleave for RowDrain<'_, T, B> {
    #[inline(always)]
    fn step(&mut self) {
        let end = SIDE.min(self.row + self.at_once);
        while self.row < end {
            self.to.write_row(self.row, words::<B>(self.done, self.row));
            self.row += 1;
        }
    }
}

/// A row of the sums of `B` places, as words.
#[inline(always)]
fn words<const B: usize>(sums: &DigitSums, row: usize) -> [u64; LANES] {
    let mut words = [0; LANES];
    for (place, sums) in sums.iter().enumerate().take(B) {
        for (word, &sum) in words.iter_mut().zip(&sums[row * LANES..][..LANES]) {
            *word = u64::wrapping_add(*word, i64::from(sum).cast_unsigned() << (8 * place));
        }
    }
    words
}

/// The bytes of a whole number with signs: those without, where each has lent 128 to the one before.
#[inline(always)]
fn with_signs(whole: i32) -> u32 {
    const HALF: u32 = 0x8080_8080;
    whole.cast_unsigned().wrapping_add(HALF) ^ HALF
}

/// Byte `j` of number `i` becomes byte `i` of number `j`.
#[inline(always)]
fn transposed([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    const LOW: u32 = 0x0000_ffff;
    const EVEN: u32 = 0x00ff_00ff;
    let (ac_low, ac_high) = (a & LOW | c << 16, a >> 16 | c & !LOW);
    let (bd_low, bd_high) = (b & LOW | d << 16, b >> 16 | d & !LOW);
    let even = |x: u32, y: u32| x & EVEN | (y & EVEN) << 8;
    let odd = |x: u32, y: u32| x >> 8 & EVEN | y & !EVEN;
    [even(ac_low, bd_low), odd(ac_low, bd_low), even(ac_high, bd_high), odd(ac_high, bd_high)]
}
