//! Integer weights cut into tiles of digits, in a scratch buffer.

use super::rows::SIDE;
use crate::{
    activations::GROUP,
    simd::{
        LANES,
        amx::gemm::{AmxGemm, DEPTH, Interleave, MAX_DIGITS, TILE_SUMS, WEIGHT_DIGITS},
    },
};

/// Tiles of elements in the scratch buffer at once: 96 KB of digits.
pub(super) const DEPTHS: usize = 24;

/// One digit of 64 elements of sixteen columns: `[64 / 4, 16]` or `[16, 64 / 4]` of four bytes, lowest first.
type WeightTile = [[u32; LANES]; DEPTH / 4];
type DigitTile = [WeightTile; WEIGHT_DIGITS];
type DigitSums = [[i32; TILE_SUMS]; MAX_DIGITS];
/// Integers of 64 elements of sixteen columns, or of sixteen elements of a group of columns.
pub(super) type IntTile = [[i32; LANES]; DEPTH];

#[repr(C, align(64))]
pub(super) struct DigitScratch {
    weights: [DigitTile; DEPTHS],
    pub(super) whole: IntTile,
    /// Sums of the last two products; `last` is the index of the last one.
    sums: [DigitSums; 2],
    last: usize,
    /// Bits of the weights' third digits, and of their fourth digits, joined by or.
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

    #[inline(always)]
    pub(super) fn clear(&mut self) {
        self.upper = [[0; LANES]; 2];
    }

    /// Cuts the integers in `whole`, one column per lane, for the right side of a product.
    #[inline(always)]
    pub(super) fn cut(&mut self, depth: usize) {
        let Self { weights, whole, upper, .. } = self;
        let [first, second, third, fourth] = &mut weights[depth];
        let mut bits = *upper;
        for row in 0..DEPTH / 4 {
            // A local array, because the compiler otherwise checks on each access whether the tiles overlap.
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

    /// Cuts the integers in `whole`, one element per lane: a group of columns and the `panel`th sixteen
    /// elements. The group is the left side of two products, one for each half of the group and of the
    /// buffer.
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

    /// Multiplies sixteen rows of `B` digits, whose tiles begin at `x`, by `depths` tiles of weights from
    /// `first` on. The weights are the left side if `LEFT`, as they were cut. Meanwhile passes the last
    /// product's sums to `to`.
    ///
    /// # Safety
    /// The tiles of `B` digits and `depths` depths exist at `x`.
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
        // SAFETY: the caller guarantees the tiles; all else lies in this buffer. Sums of 1536 elements are below 2^27.
        unsafe {
            match upper.map(|bits| bits != [0; LANES]) {
                [_, true] => unit.multiply::<B, 4, LEFT>(x, w, depths, sums, meanwhile),
                [true, false] => unit.multiply::<B, 3, LEFT>(x, w, depths, sums, meanwhile),
                [false, false] => unit.multiply::<B, 2, LEFT>(x, w, depths, sums, meanwhile),
            }
        }
    }

    /// Passes the rows of the last product's sums to `to`.
    #[inline(always)]
    pub(super) fn drain_rows<const B: usize>(&self, to: &impl RowSink) {
        RowDrain::<_, B> { done: &self.sums[self.last], row: 0, at_once: SIDE, to }.step();
    }
}

/// Receiver of rows of sums. A trait, because closures are not always compiled for the instruction set.
pub(super) trait RowSink {
    /// Receives row `row` of a product. Implementations are `#[inline(always)]`.
    fn write_row(&self, row: usize, words: [u64; LANES]);
}

/// Passes sums of `B` digit positions to the receiver, some rows at a time.
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

/// Joins a row of the sums of `B` digit positions to words.
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

/// Returns the signed digits of an integer: adding 128 to each byte carries, and the xor makes it signed.
#[inline(always)]
fn with_signs(whole: i32) -> u32 {
    const HALF: u32 = 0x8080_8080;
    whole.cast_unsigned().wrapping_add(HALF) ^ HALF
}

/// Transposes bytes: byte `j` of word `i` becomes byte `i` of word `j`.
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
