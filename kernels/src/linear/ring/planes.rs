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
//!
//! Tiles of a matrix unit were no faster here: their sums come back through memory, eight of a row for one.
//!
//! # Layout
//!
//! - this file: the sums. `cut`: planes.

mod cut;

use std::{marker::PhantomData, ops::Range};

use super::{OutWords, form::Factors};
use crate::{
    isa::Isa,
    linear::{
        form::Packing,
        packings::{self, IntegerPacking},
        part::{LinearPart, blocks, for_each_part},
    },
    pool::Pool,
    simd::{Kernel, LANES, Simd},
};

pub(super) use cut::Planes;
use cut::{Numbers, PAIRS, STEPS};

/// Rows that meet a panel before the next one does: they stay in the second-level cache.
const ROW_BLOCK: usize = 64;

/// A packing, and what the zero points of its codes make of a row.
trait Codes: IntegerPacking {
    /// What the sums of each pair of planes with a part of a group begin with.
    fn begin(numbers: &Numbers) -> [[i32; PAIRS]; 2];
}

impl Codes for packings::Four8 {
    #[inline(always)]
    fn begin(numbers: &Numbers) -> [[i32; PAIRS]; 2] {
        [numbers.zero8, [0; PAIRS]]
    }
}

impl Codes for packings::FourMinimum {
    #[inline(always)]
    fn begin(_: &Numbers) -> [[i32; PAIRS]; 2] {
        [[0; PAIRS]; 2]
    }
}

impl Codes for packings::Eight128 {
    #[inline(always)]
    fn begin(numbers: &Numbers) -> [[i32; PAIRS]; 2] {
        [numbers.zero128, [0; PAIRS]]
    }
}

impl Codes for packings::EightMinimum {
    #[inline(always)]
    fn begin(_: &Numbers) -> [[i32; PAIRS]; 2] {
        [[0; PAIRS]; 2]
    }
}

impl Codes for packings::Eight128Halves {
    #[inline(always)]
    fn begin(numbers: &Numbers) -> [[i32; PAIRS]; 2] {
        numbers.zero128_halves
    }
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

impl Forward<'_> {
    /// What a packing's numbers are multiplied with.
    #[inline(always)]
    fn factor<S: Simd>(&self) -> S::F {
        S::splat(self.factors.first * self.part.matrix.unit())
    }

    /// Writes the sums of pairs of planes of a row with a panel.
    #[inline(always)]
    fn put<S: Simd>(&self, panel: usize, row: usize, [first, second, third, fourth]: [S::W; PAIRS]) {
        let (low, high) = (S::add_shifted::<16>(first, second), S::add_shifted::<16>(third, fourth));
        let sums = S::add_shifted::<32>(low, high);
        let lanes = LANES.min(self.part.matrix.rows() - panel * LANES);
        let to = self.out.wrapping_add(row * self.stride + self.part.column + panel * LANES);
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

struct Panels<'a, P>(&'a Forward<'a>, PhantomData<P>);

impl<P: Codes> Kernel for Panels<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for rows in blocks(0..self.0.rows, ROW_BLOCK) {
            for panel in self.0.panels.clone() {
                for row in rows.clone() {
                    self.row::<S>(panel, row);
                }
            }
        }
    }
}

impl<P: Codes> Panels<'_, P> {
    /// The sums of a row with a panel. Of two rows at once, the sums would not fit the registers.
    #[inline(always)]
    fn row<S: Simd>(&self, panel: usize, row: usize) {
        let (w, x, factor) = (self.0.part.matrix, self.0.x, self.0.factor::<S>());
        let mut sums = [S::zero_wide(); PAIRS];
        let share = w.panel_bytes() / x.groups();
        for group in 0..x.groups() {
            w.prefetch(panel + 1, group * share, share);
            let numbers = x.numbers(row, group);
            // SAFETY: panel, row and group exist.
            unsafe {
                let codes = P::codes::<S>(w, panel, group);
                let scales = P::numbers::<S>(w, panel, group);
                let scales = [S::to_i32(S::mul(scales[0], factor)), S::to_i32(S::mul(scales[1], factor))];
                let whole = dot::<S, P>(x.bytes(row, group), numbers, &codes);
                add::<S, P>(&mut sums, whole, numbers, scales);
            }
        }
        self.0.put::<S>(panel, row, sums);
    }
}

/// The whole sums of pairs of planes with the parts of a group.
///
/// # Safety
///
/// The planes of a group lie at `bytes`.
#[inline(always)]
unsafe fn dot<S: Simd, P: Codes>(
    bytes: *const i32,
    numbers: &Numbers,
    codes: &[S::B; STEPS],
) -> [[S::I; PAIRS]; 2] {
    let begin = P::begin(numbers);
    let mut whole = [[S::splat_i32(0); PAIRS]; 2];
    let steps = STEPS / P::PARTS;
    for (part, whole) in whole.iter_mut().enumerate().take(P::PARTS) {
        for (pair, whole) in whole.iter_mut().enumerate() {
            let (mut low, mut high) = (S::splat_i32(begin[part][pair]), S::splat_i32(0));
            #[allow(clippy::needless_range_loop, reason = "adapters are not always compiled for the set")]
            for step in part * steps..(part + 1) * steps {
                // SAFETY: the caller's.
                let [x_low, x_high] = unsafe {
                    [*bytes.add(2 * pair * STEPS + step), *bytes.add((2 * pair + 1) * STEPS + step)]
                };
                low = S::dot_bytes(low, codes[step], x_low);
                high = S::dot_bytes(high, codes[step], x_high);
            }
            *whole = S::add_i32(low, S::times_256(high));
        }
    }
    whole
}

/// Adds what a group of a row comes to: its whole sums times scales, and its minimum.
#[inline(always)]
fn add<S: Simd, P: Codes>(
    sums: &mut [S::W; PAIRS],
    whole: [[S::I; PAIRS]; 2],
    numbers: &Numbers,
    scales: [S::I; 2],
) {
    for (part, whole) in whole.into_iter().enumerate().take(P::PARTS) {
        for (sum, whole) in sums.iter_mut().zip(whole) {
            *sum = S::add_product(*sum, whole, scales[part]);
        }
    }
    if P::HAS_MINIMUM {
        let [low, high] = numbers.sum;
        sums[0] = S::add_product(sums[0], scales[1], S::splat_i32(low));
        sums[2] = S::add_product(sums[2], scales[1], S::splat_i32(high));
    }
}
