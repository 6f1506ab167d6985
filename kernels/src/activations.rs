//! Rows of activations and the forms of them that packed weights are multiplied with.
//!
//! Integer weights meet activations of 8 bits: each group of 32 elements of a row is scaled to -127..=127 by its own
//! largest magnitude. Beside the bytes a row keeps what the zero points and minima of the weights need of it:
//! sums of the bytes, so that neither costs an instruction for an element.

use crate::{
    isa::Isa,
    pool::Pool,
    simd::{Kernel, Simd},
};

/// Elements of a row that share a scale.
pub(crate) const GROUP: usize = 32;

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
    pub(crate) bytes: Vec<i8>,
    /// One a group.
    pub(crate) scales: Vec<f32>,
    /// -8 times the sum of a group's bytes.
    pub(crate) zero8: Vec<i32>,
    /// -128 times the sum of a group's bytes.
    pub(crate) zero128: Vec<i32>,
    /// -128 times the sum of each half group's bytes.
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
        if self.floats.len() < rows * width {
            self.floats.resize(rows * width, 0.0);
        }
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
        let groups = self.rows * self.groups();
        self.bytes.truncate(self.rows * self.width);
        self.scales.truncate(groups);
        self.sums.truncate(groups);
        self.zero8.truncate(groups);
        self.zero128.truncate(groups);
        self.zero128_halves.truncate(2 * groups);
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

    pub(crate) fn pairs(&self) -> usize {
        self.width.div_ceil(2)
    }

    /// True if `forms` were computed for as many rows as there are.
    pub(crate) fn holds(&self, forms: Forms) -> bool {
        let bytes =
            self.bytes.len() == self.rows * self.width && self.scales.len() == self.rows * self.groups();
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
        self.bytes.resize(self.rows * self.width, 0);
        self.scales.resize(groups, 0.0);
        self.sums.resize(groups, 0.0);
        self.zero8.resize(groups, 0);
        self.zero128.resize(groups, 0);
        self.zero128_halves.resize(2 * groups, 0);
        let job = Quantize {
            floats: self.floats.as_ptr(),
            bytes: self.bytes.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            zero8: self.zero8.as_mut_ptr(),
            zero128: self.zero128.as_mut_ptr(),
            zero128_halves: self.zero128_halves.as_mut_ptr(),
            first: 0,
            last: 0,
        };
        // About 10 ns a group: below a few hundred groups a second thread costs more than it brings.
        let chunk = groups.div_ceil(4 * pool.threads()).max(256);
        pool.run(groups.div_ceil(chunk), |i| {
            isa.dispatch(job.over(i * chunk, groups.min((i + 1) * chunk)));
        });
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

/// Quantizes groups `first..last`.
#[derive(Clone, Copy)]
struct Quantize {
    floats: *const f32,
    bytes: *mut i8,
    scales: *mut f32,
    sums: *mut f32,
    zero8: *mut i32,
    zero128: *mut i32,
    zero128_halves: *mut i32,
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
        for group in self.first..self.last {
            // SAFETY: `group` is below the number of groups for which `quantize` has sized every buffer, and no other
            // thread has this group.
            unsafe {
                let from = self.floats.add(group * GROUP);
                let (a, b) = (S::load(from), S::load(from.add(16)));
                let largest = S::max_lane(S::max(S::abs(a), S::abs(b)));
                // A maximum may overlook a NaN, a sum does not: a group that is not all numbers gets no scale.
                let scale = largest / 127.0 + 0.0 * S::sum(S::add(a, b));
                // A group of zeroes, or as good as zeroes, has bytes of zero.
                let inverse = 127.0 / largest;
                let inverse = S::splat(if inverse.is_finite() { inverse } else { 0.0 });
                let (a, b) = (S::to_i32(S::mul(a, inverse)), S::to_i32(S::mul(b, inverse)));
                let to = self.bytes.add(group * GROUP);
                S::store_i8(to, a);
                S::store_i8(to.add(16), b);
                let halves = [S::sum_i32(a), S::sum_i32(b)];
                // Infinite or NaN inputs give nonsense sums, which must wrap, not trap: the row is lost anyway.
                let sum = halves[0].wrapping_add(halves[1]);
                *self.scales.add(group) = scale;
                *self.sums.add(group) = scale * sum as f32;
                *self.zero8.add(group) = sum.wrapping_mul(-8);
                *self.zero128.add(group) = sum.wrapping_mul(-128);
                *self.zero128_halves.add(2 * group) = halves[0].wrapping_mul(-128);
                *self.zero128_halves.add(2 * group + 1) = halves[1].wrapping_mul(-128);
            }
        }
    }
}
