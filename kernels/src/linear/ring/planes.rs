//! Sums over codes, with words as bytes: what the instructions for bytes are there for.
//!
//! A word is eight bytes with signs, `sum over p: 256^p byte_p` modulo 2^64, so a row of words is eight rows of bytes, *planes*, to
//! codes of a byte. Sums of a group of 32 elements are exact in 32 bits, also of two planes together:
//!
//! ```text
//! whole_j  = sum_i (code_i - zero) (byte_2j_i + 256 byte_2j+1_i)                     below 2^29
//! out      = sum_j 2^(16 j) (sum over groups: scale whole_j) + sum over groups: minimum (sum of x)
//! ```
//!
//! A group costs eight steps for each plane and four products for all of them, where words cost two products an element.

use std::{marker::PhantomData, ops::Range};

use super::{OutWords, form::Factors};
use crate::{
    activations::GROUP,
    isa::Isa,
    linear::{
        form::Packing,
        packings::{self, IntegerPacking},
        part::{LinearPart, blocks, for_each_part},
    },
    pool::Pool,
    simd::{Kernel, LANES, Simd},
};

/// Bytes of a word.
const PLANES: usize = 8;
/// Steps of four elements in a group.
const STEPS: usize = GROUP / 4;

/// What lies where in a group of a row, in numbers of 32 bits: `[PLANES, STEPS]` times four bytes; what the sums of each plane begin
/// with for a zero point of 8, of 128, and of 128 for each half; the sum of the group's words in halves.
const ZERO8: usize = PLANES * STEPS;
const ZERO128: usize = ZERO8 + PLANES;
const ZERO128_HALVES: usize = ZERO128 + PLANES;
const SUM: usize = ZERO128_HALVES + 2 * PLANES;
/// Whole cache lines.
const GROUP_NUMBERS: usize = (SUM + 2).next_multiple_of(16);

/// Rows that meet a panel before the next one does: they stay in the second-level cache.
const ROW_BLOCK: usize = 64;

/// Rows of words as planes of bytes.
pub(super) struct Planes {
    groups: usize,
    /// `[rows, groups, GROUP_NUMBERS]`.
    numbers: Vec<i32>,
}

impl Planes {
    /// Those of `rows` rows of `x`, of whole groups.
    pub(super) fn of(pool: &mut Pool, isa: Isa, x: &[u64], rows: usize) -> Self {
        let groups = x.len() / rows.max(1) / GROUP;
        let mut numbers = vec![0; rows * groups * GROUP_NUMBERS];
        let to = Numbers(numbers.as_mut_ptr());
        // A row or two are not worth another thread's time.
        let chunk = rows.div_ceil(4 * pool.threads()).max(2);
        pool.run(rows.div_ceil(chunk), |i| {
            let to = &to;
            let own = i * chunk * groups..rows.min((i + 1) * chunk) * groups;
            // SAFETY: there are numbers for all groups, and no other chunk has these.
            let to = unsafe {
                std::slice::from_raw_parts_mut(to.0.add(own.start * GROUP_NUMBERS), own.len() * GROUP_NUMBERS)
            };
            isa.dispatch(Cut { x: &x[own.start * GROUP..own.end * GROUP], to });
        });
        Self { groups, numbers }
    }

    #[inline(always)]
    fn group(&self, row: usize, group: usize) -> *const i32 {
        self.numbers.as_ptr().wrapping_add((row * self.groups + group) * GROUP_NUMBERS)
    }
}

struct Numbers(*mut i32);
// SAFETY: chunks write disjoint groups of a buffer that outlives the parallel region.
unsafe impl Sync for Numbers {}

/// Cuts groups of words into planes.
struct Cut<'a> {
    x: &'a [u64],
    to: &'a mut [i32],
}

impl Kernel for Cut<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let groups = self.x.as_chunks::<GROUP>().0.iter();
        for (x, to) in groups.zip(self.to.as_chunks_mut::<GROUP_NUMBERS>().0) {
            cut(x, to);
        }
    }
}

#[inline(always)]
fn cut(x: &[u64; GROUP], to: &mut [i32; GROUP_NUMBERS]) {
    let mut sum = 0u64;
    let mut halves = [[0i32; PLANES]; 2];
    for (eight, x) in x.as_chunks::<8>().0.iter().enumerate() {
        let planes = transposed(x.map(with_signs));
        for (plane, bytes) in planes.into_iter().enumerate() {
            let at = plane * STEPS + 2 * eight;
            (to[at], to[at + 1]) = (bytes as i32, (bytes >> 32) as i32);
            halves[eight / 2][plane] +=
                bytes.to_le_bytes().map(|byte| i32::from(byte.cast_signed())).iter().sum::<i32>();
        }
        sum = x.iter().fold(sum, |sum, &x| sum.wrapping_add(x));
    }
    for plane in 0..PLANES {
        let [first, second] = [halves[0][plane], halves[1][plane]];
        to[ZERO8 + plane] = -8 * (first + second);
        to[ZERO128 + plane] = -128 * (first + second);
        to[ZERO128_HALVES + plane] = -128 * first;
        to[ZERO128_HALVES + PLANES + plane] = -128 * second;
    }
    (to[SUM], to[SUM + 1]) = super::halves(sum);
}

/// The bytes of a word with signs: those without, where each has lent 128 to the one before.
#[inline(always)]
fn with_signs(word: u64) -> u64 {
    const HALF: u64 = 0x8080_8080_8080_8080;
    word.wrapping_add(HALF) ^ HALF
}

/// Byte `j` of word `i` becomes byte `i` of word `j`.
#[inline(always)]
fn transposed(mut words: [u64; 8]) -> [u64; 8] {
    let masks = [(4, 0x0000_0000_ffff_ffff_u64), (2, 0x0000_ffff_0000_ffff), (1, 0x00ff_00ff_00ff_00ff)];
    let mut stage = 0;
    while stage < 3 {
        let (distance, mask) = masks[stage];
        let bits = 8 * distance;
        let mut i = 0;
        while i < 8 {
            if i & distance == 0 {
                let (low, high) = (words[i], words[i + distance]);
                words[i] = low & mask | (high & mask) << bits;
                words[i + distance] = low >> bits & mask | high & !mask;
            }
            i += 1;
        }
        stage += 1;
    }
    words
}

/// Where the starts of a packing's sums lie.
trait Starts: IntegerPacking {
    /// Of its first part; `None` without a zero point.
    const AT: Option<usize>;
}

impl Starts for packings::Four8 {
    const AT: Option<usize> = Some(ZERO8);
}
impl Starts for packings::FourMinimum {
    const AT: Option<usize> = None;
}
impl Starts for packings::Eight128 {
    const AT: Option<usize> = Some(ZERO128);
}
impl Starts for packings::EightMinimum {
    const AT: Option<usize> = None;
}
impl Starts for packings::Eight128Halves {
    const AT: Option<usize> = Some(ZERO128_HALVES);
}

#[allow(clippy::too_many_arguments, reason = "the shapes of one matrix product")]
pub(super) fn forward(
    pool: &mut Pool,
    isa: Isa,
    x: &Planes,
    rows: usize,
    parts: &[LinearPart<'_>],
    exponent: i32,
    out: &mut [u64],
    stride: usize,
) {
    let out = OutWords(out.as_mut_ptr());
    let panels: usize = parts.iter().map(|part| part.matrix.panels()).sum();
    let chunk = panels.div_ceil(4 * pool.threads()).max(1);
    pool.run(panels.div_ceil(chunk), |i| {
        let out = &out;
        for_each_part(parts, i * chunk, panels.min((i + 1) * chunk), |part, first, last| {
            let factors = part.matrix.factors(exponent);
            isa.dispatch(Forward { x, rows, part, panels: first..last, factors, out: out.0, stride });
        });
    });
}

/// Some panels of a part, for all rows.
struct Forward<'a> {
    x: &'a Planes,
    rows: usize,
    part: LinearPart<'a>,
    panels: Range<usize>,
    factors: Factors,
    out: *mut u64,
    stride: usize,
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        match self.part.matrix.packing() {
            Packing::Four8 => S::call(Panels::<packings::Four8>(&self, PhantomData)),
            Packing::FourMinimum => S::call(Panels::<packings::FourMinimum>(&self, PhantomData)),
            Packing::Eight128 => S::call(Panels::<packings::Eight128>(&self, PhantomData)),
            Packing::EightMinimum => S::call(Panels::<packings::EightMinimum>(&self, PhantomData)),
            Packing::Eight128Halves => S::call(Panels::<packings::Eight128Halves>(&self, PhantomData)),
            Packing::F32 | Packing::F16 | Packing::Bf16 => unreachable!("floats have no codes"),
        }
    }
}

struct Panels<'a, P>(&'a Forward<'a>, PhantomData<P>);

impl<P: Starts> Kernel for Panels<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for rows in blocks(0..self.0.rows, ROW_BLOCK) {
            for panel in self.0.panels.clone() {
                let Range { start: mut row, end } = rows;
                while row < end {
                    row += if end - row >= 2 {
                        self.tile::<S, 2>(panel, row)
                    } else {
                        self.tile::<S, 1>(panel, row)
                    };
                }
            }
        }
    }
}

impl<P: Starts> Panels<'_, P> {
    /// The sums of `M` rows with a panel.
    #[inline(always)]
    fn tile<S: Simd, const M: usize>(&self, panel: usize, row: usize) -> usize {
        let (w, x) = (self.0.part.matrix, self.0.x);
        let factor = S::splat(self.0.factors.first * w.unit());
        let mut sums = [[S::zero_wide(); PLANES / 2]; M];
        let share = w.panel_bytes() / x.groups;
        for group in 0..x.groups {
            w.prefetch(panel + 1, group * share, share);
            // SAFETY: panel and group exist.
            let (codes, numbers) =
                unsafe { (P::codes::<S>(w, panel, group), P::numbers::<S>(w, panel, group)) };
            let numbers = [S::to_i32(S::mul(numbers[0], factor)), S::to_i32(S::mul(numbers[1], factor))];
            for (m, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the row has all numbers of the group.
                unsafe { add::<S, P>(sums, x.group(row + m, group), &codes, numbers) };
            }
        }
        for (m, [first, second, third, fourth]) in sums.into_iter().enumerate() {
            let low = S::add_shifted::<16>(first, second);
            let high = S::add_shifted::<16>(third, fourth);
            self.put::<S>(panel, row + m, S::add_shifted::<32>(low, high));
        }
        M
    }

    #[inline(always)]
    fn put<S: Simd>(&self, panel: usize, row: usize, sums: S::W) {
        let Forward { part, out, stride, .. } = self.0;
        let lanes = LANES.min(part.matrix.rows() - panel * LANES);
        let to = out.wrapping_add(row * stride + part.column + panel * LANES);
        let mut words = [0; LANES];
        // SAFETY: columns were checked to lie within `out`, and no other chunk uses these.
        unsafe {
            if lanes == LANES {
                S::store_wide(to, sums);
            } else {
                S::store_wide(words.as_mut_ptr(), sums);
                std::ptr::copy_nonoverlapping(words.as_ptr(), to, lanes);
            }
        }
    }
}

/// Adds a group of a row, whose numbers are `x`, to its sums, which are those of pairs of planes.
///
/// # Safety
///
/// There are [`GROUP_NUMBERS`] of them.
#[inline(always)]
unsafe fn add<S: Simd, P: Starts>(
    sums: &mut [S::W; PLANES / 2],
    x: *const i32,
    codes: &[S::B; STEPS],
    numbers: [S::I; 2],
) {
    // SAFETY: the caller's.
    unsafe {
        for (pair, sum) in sums.iter_mut().enumerate() {
            for part in 0..P::PARTS {
                let low = plane::<S, P>(x, codes, 2 * pair, part);
                let high = plane::<S, P>(x, codes, 2 * pair + 1, part);
                let whole = S::add_i32(low, S::times_256(high));
                *sum = S::add_product(*sum, whole, numbers[part]);
            }
        }
        if P::HAS_MINIMUM {
            sums[0] = S::add_product(sums[0], numbers[1], S::splat_i32(*x.add(SUM)));
            sums[2] = S::add_product(sums[2], numbers[1], S::splat_i32(*x.add(SUM + 1)));
        }
    }
}

/// The whole sums of a plane with a part of a group.
///
/// # Safety
///
/// As of [`add`].
#[inline(always)]
unsafe fn plane<S: Simd, P: Starts>(x: *const i32, codes: &[S::B; STEPS], plane: usize, part: usize) -> S::I {
    // SAFETY: the caller's.
    unsafe {
        let mut sum = match P::AT {
            Some(at) => S::splat_i32(*x.add(at + part * PLANES + plane)),
            None => S::splat_i32(0),
        };
        let steps = STEPS / P::PARTS;
        for step in part * steps..(part + 1) * steps {
            sum = S::dot_bytes(sum, codes[step], *x.add(plane * STEPS + step));
        }
        sum
    }
}
