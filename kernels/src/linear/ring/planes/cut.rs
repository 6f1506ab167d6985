//! Rows of words, cut into planes of bytes.

use super::super::halves;
use crate::{
    activations::GROUP,
    isa::Isa,
    pool::Pool,
    simd::{Kernel, Simd},
};

/// Bytes of a word.
pub(super) const PLANES: usize = 8;
/// Planes that are summed together.
pub(super) const PAIRS: usize = PLANES / 2;
/// Steps of four elements in a group.
pub(super) const STEPS: usize = GROUP / 4;

/// A group of a row: `[PLANES, STEPS]` times four bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bytes([i32; PLANES * STEPS]);

/// What belongs to a group of a row.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    /// -8 times the sums of the bytes of each pair of planes, `low + 256 high`.
    pub(super) zero8: [i32; PAIRS],
    /// -128 times them.
    pub(super) zero128: [i32; PAIRS],
    /// -128 times those of each half.
    pub(super) zero128_halves: [[i32; PAIRS]; 2],
    /// The sum of the words, in halves.
    pub(super) sum: [i32; 2],
}

const NOTHING: Numbers =
    Numbers { zero8: [0; PAIRS], zero128: [0; PAIRS], zero128_halves: [[0; PAIRS]; 2], sum: [0; 2] };

/// Rows of words as planes of bytes.
pub(in super::super) struct Planes {
    groups: usize,
    /// `[rows, groups]`.
    bytes: Vec<Bytes>,
    /// The same.
    numbers: Vec<Numbers>,
}

impl Planes {
    /// Those of `rows` rows of `x`, of whole groups.
    pub(in super::super) fn of(pool: &mut Pool, isa: Isa, x: &[u64], rows: usize) -> Self {
        let groups = x.len() / rows.max(1) / GROUP;
        let count = rows * groups;
        let (mut bytes, mut numbers) = (vec![Bytes([0; PLANES * STEPS]); count], vec![NOTHING; count]);
        let to = To(bytes.as_mut_ptr(), numbers.as_mut_ptr());
        // A few rows are not worth another thread's time.
        let chunk = rows.div_ceil(4 * pool.threads()).max(4);
        pool.run(rows.div_ceil(chunk), |i| {
            for row in i * chunk..rows.min((i + 1) * chunk) {
                let x = &x[row * groups * GROUP..][..groups * GROUP];
                isa.dispatch(Cut { x, to: &to, at: row * groups });
            }
        });
        Self { groups, bytes, numbers }
    }

    #[inline(always)]
    pub(super) fn groups(&self) -> usize {
        self.groups
    }

    /// The bytes of a group of a row.
    #[inline(always)]
    pub(super) fn bytes(&self, row: usize, group: usize) -> *const i32 {
        self.bytes.as_ptr().wrapping_add(row * self.groups + group).cast()
    }

    #[inline(always)]
    pub(super) fn numbers(&self, row: usize, group: usize) -> &Numbers {
        &self.numbers[row * self.groups + group]
    }
}

struct To(*mut Bytes, *mut Numbers);
// SAFETY: chunks write disjoint groups of buffers that outlive the parallel region.
unsafe impl Sync for To {}

/// Cuts a row, whose first group goes to place `at`.
struct Cut<'a> {
    x: &'a [u64],
    to: &'a To,
    at: usize,
}

impl Kernel for Cut<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for (group, x) in self.x.as_chunks().0.iter().enumerate() {
            let at = self.at + group;
            // SAFETY: there is a place for each group, and no other chunk has this one.
            unsafe { cut(x, &mut *self.to.0.add(at), &mut *self.to.1.add(at)) };
        }
    }
}

#[inline(always)]
fn cut(x: &[u64; GROUP], to: &mut Bytes, numbers: &mut Numbers) {
    let mut sum = 0u64;
    let mut sums = [[0i32; PLANES]; 2];
    for (eight, x) in x.as_chunks::<8>().0.iter().enumerate() {
        for (plane, bytes) in transposed(x.map(with_signs)).into_iter().enumerate() {
            let at = plane * STEPS + 2 * eight;
            (to.0[at], to.0[at + 1]) = (bytes as i32, (bytes >> 32) as i32);
            sums[eight / 2][plane] += sum_of_bytes(bytes);
        }
        sum = x.iter().fold(sum, |sum, &x| sum.wrapping_add(x));
    }
    for pair in 0..PAIRS {
        let [first, second] = sums.map(|planes| planes[2 * pair] + 256 * planes[2 * pair + 1]);
        numbers.zero8[pair] = -8 * (first + second);
        numbers.zero128[pair] = -128 * (first + second);
        numbers.zero128_halves[0][pair] = -128 * first;
        numbers.zero128_halves[1][pair] = -128 * second;
    }
    numbers.sum = halves(sum).into();
}

/// The bytes of a word with signs: those without, where each has lent 128 to the one before.
#[inline(always)]
fn with_signs(word: u64) -> u64 {
    const HALF: u64 = 0x8080_8080_8080_8080;
    word.wrapping_add(HALF) ^ HALF
}

/// Of bytes with signs.
#[inline(always)]
fn sum_of_bytes(bytes: u64) -> i32 {
    // Without signs, each is 128 more, and four sums of 16 bits are one product.
    const HALF: u64 = 0x8080_8080_8080_8080;
    const PAIRS_OF: u64 = 0x00ff_00ff_00ff_00ff;
    let bytes = bytes ^ HALF;
    let pairs = (bytes & PAIRS_OF) + (bytes >> 8 & PAIRS_OF);
    (pairs.wrapping_mul(0x0001_0001_0001_0001) >> 48) as i32 - 8 * 128
}

/// Byte `j` of word `i` becomes byte `i` of word `j`.
#[inline(always)]
fn transposed(words: [u64; 8]) -> [u64; 8] {
    let words = swapped::<4>(words, 0x0000_0000_ffff_ffff);
    let words = swapped::<2>(words, 0x0000_ffff_0000_ffff);
    swapped::<1>(words, 0x00ff_00ff_00ff_00ff)
}

/// Swaps the upper bytes of words with the lower ones of those `DISTANCE` behind them.
#[inline(always)]
fn swapped<const DISTANCE: usize>(mut words: [u64; 8], lower: u64) -> [u64; 8] {
    let mut i = 0;
    while i < 8 {
        if i & DISTANCE == 0 {
            let (first, second) = (words[i], words[i + DISTANCE]);
            words[i] = first & lower | (second & lower) << (8 * DISTANCE);
            words[i + DISTANCE] = first >> (8 * DISTANCE) & lower | second & !lower;
        }
        i += 1;
    }
    words
}
