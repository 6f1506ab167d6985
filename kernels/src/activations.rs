//! Rows of activations and the forms of them that packed weights are multiplied with.
//!
//! Integer weights meet activations of 8 bits: each group of 32 elements of a row is scaled to -127..=127 by its own
//! largest magnitude. Beside the bytes a row keeps what the zero points and minima of the weights need of it:
//! sums of the bytes, so that neither costs an instruction for an element.
//!
//! Sixteen rows lie interleaved, group by group, and so do the rows left over: what a tile of rows needs of a group are neighbours,
//! at distances that are known when it is compiled, and one address finds all of it.
//!
//! ```text
//! [rows / 16, groups, 16] and [groups, rows % 16]     of 32 bytes, of a scale, of a sum
//! ```

use crate::{
    isa::Isa,
    pool::Pool,
    simd::{Kernel, LANES, Simd},
};

/// Elements of a row that share a scale.
pub(crate) const GROUP: usize = 32;

/// Rows that lie interleaved, at most.
pub(crate) const SIDE: usize = 16;

/// Which forms of the activations the weights need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forms {
    /// Bytes with scales, for integer weights.
    pub(crate) bytes: bool,
    /// bf16, for bf16 weights.
    pub(crate) bf16: bool,
}

impl Forms {
    /// Both demands together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { bytes: self.bytes || other.bytes, bf16: self.bf16 || other.bf16 }
    }
}

/// A matrix of activations, `[rows, width]`, with the forms computed by [`Activations::prepare`].
#[derive(Debug, Default)]
pub struct Activations {
    rows: usize,
    width: usize,
    /// At least as many as there are; what is behind them is left over.
    floats: Vec<f32>,
    /// Rows whose bytes and what belongs to them are there.
    quantized: usize,
    /// Rows that there were when bytes were computed: they say where these lie.
    laid_out: usize,
    pub(crate) bytes: Vec<i8>,
    /// One a group.
    pub(crate) scales: Vec<f32>,
    /// -8 times the sum of a group's bytes.
    pub(crate) zero8: Vec<i32>,
    /// -128 times the sum of a group's bytes.
    pub(crate) zero128: Vec<i32>,
    /// -128 times the sum of each half group's bytes: those of the first halves of sixteen rows, then of the second.
    pub(crate) zero128_halves: Vec<i32>,
    /// Scale times the sum of a group's bytes.
    pub(crate) sums: Vec<f32>,
    /// Pairs of bf16; a row of odd width is padded with a zero.
    pub(crate) bf16: Vec<u32>,
}

impl Activations {
    /// Makes room for `rows` rows of `width`. Contents are unspecified afterwards; memory is kept for reuse.
    pub fn reshape(&mut self, rows: usize, width: usize) {
        self.rows = rows;
        self.width = width;
        self.quantized = 0;
        grow(&mut self.floats, rows * width);
    }

    /// Adds `rows` whole rows behind those there are. Forms are stale until the next [`Activations::prepare`].
    ///
    /// # Panics
    /// If these are not whole rows.
    pub fn append(&mut self, rows: &[f32]) {
        assert!(rows.len().is_multiple_of(self.width.max(1)), "whole rows of {}", self.width);
        self.floats.truncate(self.rows * self.width);
        self.floats.extend_from_slice(rows);
        self.rows += rows.len() / self.width.max(1);
    }

    /// Drops all rows but the first `rows`, in every form; memory is kept for reuse.
    pub fn truncate(&mut self, rows: usize) {
        self.rows = self.rows.min(rows);
        self.quantized = self.quantized.min(self.rows);
        self.bf16.truncate(self.rows * self.pairs());
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// All elements, row after row.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.floats[..self.rows * self.width]
    }

    /// All elements, row after row. Forms are stale until the next [`Activations::prepare`].
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.floats[..self.rows * self.width]
    }

    pub(crate) fn groups(&self) -> usize {
        self.width / GROUP
    }

    /// Where the first group of row `row` lies among bytes and what belongs to them, and how far from there the next one.
    pub(crate) fn place(&self, row: usize) -> (usize, usize) {
        place(row, self.laid_out, self.groups())
    }

    pub(crate) fn pairs(&self) -> usize {
        self.width.div_ceil(2)
    }

    /// True if `forms` were computed for as many rows as there are.
    pub(crate) fn holds(&self, forms: Forms) -> bool {
        let bytes = self.quantized == self.rows;
        let bf16 = self.bf16.len() == self.rows * self.pairs();
        (bytes || !forms.bytes) && (bf16 || !forms.bf16)
    }

    /// Computes `forms` of every row.
    pub fn prepare(&mut self, pool: &mut Pool, isa: Isa, forms: Forms) {
        if forms.bytes {
            self.quantize(pool, isa);
        }
        if forms.bf16 {
            self.round_to_bf16();
        }
    }

    fn quantize(&mut self, pool: &mut Pool, isa: Isa) {
        assert!(self.width.is_multiple_of(GROUP), "integer weights have rows of whole groups");
        let groups = self.rows * self.groups();
        grow(&mut self.bytes, groups * GROUP);
        grow(&mut self.scales, groups);
        grow(&mut self.sums, groups);
        grow(&mut self.zero8, groups);
        grow(&mut self.zero128, groups);
        grow(&mut self.zero128_halves, 2 * groups);
        let job = Quantize {
            floats: self.floats.as_ptr(),
            bytes: self.bytes.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            zero8: self.zero8.as_mut_ptr(),
            zero128: self.zero128.as_mut_ptr(),
            zero128_halves: self.zero128_halves.as_mut_ptr(),
            rows: self.rows,
            groups: self.groups(),
            first: 0,
            last: 0,
        };
        // A thread writes neighbours. About 10 ns a group: below a few hundred a second thread costs more than it brings.
        let columns = self.rows.div_ceil(SIDE) * self.groups();
        let chunk = columns.div_ceil(4 * pool.threads()).max(256 / SIDE.min(self.rows.max(1)));
        pool.run(columns.div_ceil(chunk), |i| {
            isa.dispatch(job.over(i * chunk, columns.min((i + 1) * chunk)));
        });
        (self.quantized, self.laid_out) = (self.rows, self.rows);
    }

    fn round_to_bf16(&mut self) {
        let pairs = self.pairs();
        self.bf16.clear();
        self.bf16.reserve(self.rows * pairs);
        for row in self.floats.chunks_exact(self.width.max(1)).take(self.rows) {
            self.bf16.extend(row.chunks(2).map(|pair| {
                let bits = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
                bits(pair[0]) | pair.get(1).map_or(0, |&x| bits(x)) << 16
            }));
        }
    }
}

/// Makes room for `len` elements. Never takes any away: what is behind those in use is left over.
fn grow<T: Copy + Default>(values: &mut Vec<T>, len: usize) {
    if values.len() < len {
        values.resize(len, T::default());
    }
}

/// Where the first group of row `row` lies, of `rows` rows of so many groups, and how far from there the next one.
#[inline(always)]
fn place(row: usize, rows: usize, groups: usize) -> (usize, usize) {
    let first = row / SIDE * SIDE;
    (first * groups + row % SIDE, SIDE.min(rows - first))
}

/// The same where a group has two numbers.
#[inline(always)]
pub(crate) fn place_of_halves(start: usize) -> usize {
    2 * start - start % SIDE
}

/// Quantizes a group of sixteen rows after the other: those from `first` to `last`, in the order in which they lie.
#[derive(Clone, Copy)]
struct Quantize {
    floats: *const f32,
    bytes: *mut i8,
    scales: *mut f32,
    sums: *mut f32,
    zero8: *mut i32,
    zero128: *mut i32,
    zero128_halves: *mut i32,
    rows: usize,
    groups: usize,
    first: usize,
    last: usize,
}

// SAFETY: threads are given disjoint ranges of groups of buffers that outlive the parallel region.
unsafe impl Sync for Quantize {}

impl Quantize {
    fn over(&self, first: usize, last: usize) -> Self {
        Self { first, last, ..*self }
    }
}

impl Kernel for Quantize {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        for column in self.first..self.last {
            let (row, group) = (column / self.groups * SIDE, column % self.groups);
            let (start, step) = place(row, self.rows, self.groups);
            let (from, at) = (row * self.groups + group, start + group * step);
            let halves = place_of_halves(start) + 2 * group * step;
            // SAFETY: `quantize` has sized every buffer for all groups, and no other thread has these.
            unsafe {
                if step == SIDE {
                    self.sixteen::<S>(from, at, halves);
                    continue;
                }
                for m in 0..step {
                    let halves = (halves + m, halves + m + step);
                    self.group::<S>(from + m * self.groups, at + m, halves);
                }
            }
        }
    }
}

impl Quantize {
    /// A group of sixteen rows: what [`Quantize::group`] does with each, a row in a lane.
    #[inline(always)]
    unsafe fn sixteen<S: Simd>(&self, from: usize, at: usize, at_halves: usize) {
        const { assert!(SIDE == LANES, "a lane for each row") };
        // SAFETY: the caller's: the groups exist, and there is room where they go.
        unsafe {
            // Loops, not adapters: only what is inlined by force is compiled for the set.
            let mut magnitudes = [S::splat(0.0); LANES];
            for (m, magnitude) in magnitudes.iter_mut().enumerate() {
                let from = self.floats.add((from + m * self.groups) * GROUP);
                *magnitude = S::max(S::abs(S::load(from)), S::abs(S::load(from.add(LANES))));
            }
            let mut largest = S::splat(0.0);
            for column in S::transpose(magnitudes) {
                largest = S::max(largest, column);
            }
            let mut inverses = [0.0f32; LANES];
            S::store(inverses.as_mut_ptr(), S::div(S::splat(127.0), largest));
            let mut halves = [S::splat(0.0); 2];
            for (half, sum) in halves.iter_mut().enumerate() {
                let mut rows = [S::splat(0.0); LANES];
                for (m, row) in rows.iter_mut().enumerate() {
                    let inverse = if inverses[m].is_finite() { inverses[m] } else { 0.0 };
                    let from = self.floats.add((from + m * self.groups) * GROUP + half * LANES);
                    *row = S::round(S::mul(S::load(from), S::splat(inverse)));
                    S::store_i8(self.bytes.add((at + m) * GROUP + half * LANES), S::to_i32(*row));
                }
                // Whole numbers, so exact in whatever order; of rows that are not all numbers they are none either.
                for column in S::transpose(rows) {
                    *sum = S::add(*sum, column);
                }
                let zero128 = S::to_i32(S::mul(*sum, S::splat(-128.0)));
                S::store_i32(self.zero128_halves.add(at_halves + half * LANES), zero128);
            }
            let sum = S::add(halves[0], halves[1]);
            let scale = S::fma(S::splat(0.0), sum, S::div(largest, S::splat(127.0)));
            S::store(self.scales.add(at), scale);
            S::store(self.sums.add(at), S::mul(scale, sum));
            S::store_i32(self.zero8.add(at), S::to_i32(S::mul(sum, S::splat(-8.0))));
            S::store_i32(self.zero128.add(at), S::to_i32(S::mul(sum, S::splat(-128.0))));
        }
    }

    /// The group that is the `from`th of all rows, one after the other.
    #[inline(always)]
    unsafe fn group<S: Simd>(&self, from: usize, at: usize, at_halves: (usize, usize)) {
        // SAFETY: the caller's: the group exists, and there is room where it goes.
        unsafe {
            let from = self.floats.add(from * GROUP);
            let (a, b) = (S::load(from), S::load(from.add(16)));
            let largest = S::max_lane(S::max(S::abs(a), S::abs(b)));
            // A maximum may overlook a NaN, a sum does not: a group that is not all numbers gets no scale.
            let scale = largest / 127.0 + 0.0 * S::sum(S::add(a, b));
            // A group of zeroes, or as good as zeroes, has bytes of zero.
            let inverse = 127.0 / largest;
            let inverse = S::splat(if inverse.is_finite() { inverse } else { 0.0 });
            let (a, b) = (S::to_i32(S::mul(a, inverse)), S::to_i32(S::mul(b, inverse)));
            let to = self.bytes.add(at * GROUP);
            S::store_i8(to, a);
            S::store_i8(to.add(16), b);
            let halves = [S::sum_i32(a), S::sum_i32(b)];
            // Infinite or NaN inputs give nonsense sums, which must wrap, not trap: the row is lost anyway.
            let sum = halves[0].wrapping_add(halves[1]);
            *self.scales.add(at) = scale;
            *self.sums.add(at) = scale * sum as f32;
            *self.zero8.add(at) = sum.wrapping_mul(-8);
            *self.zero128.add(at) = sum.wrapping_mul(-128);
            *self.zero128_halves.add(at_halves.0) = halves[0].wrapping_mul(-128);
            *self.zero128_halves.add(at_halves.1) = halves[1].wrapping_mul(-128);
        }
    }
}
