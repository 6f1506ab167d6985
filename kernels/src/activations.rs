//! Rows of activations and the forms of them that packed weights are multiplied with.
//!
//! Integer weights meet whole numbers: each group of 32 elements of a row is scaled by its own largest magnitude, to -127..=127 or,
//! where the row's error would come from this group ([`Rounding`]), to -16319..=16319. Such a *wide* number is two bytes,
//! `128 high + low`, so its products are those of bytes too. Beside the bytes a row keeps what the zero points and minima of the
//! weights need of it: sums of the numbers, so that neither costs an instruction for an element.
//!
//! Sixteen rows lie interleaved, group by group, and so do the rows left over: what a tile of rows needs of a group are neighbours,
//! at distances that are known when it is compiled, and one address finds all of it.
//!
//! ```text
//! [rows / 16, groups, 16] and [groups, rows % 16]     of 32 bytes, of a scale, of a sum
//! ```

mod quantize;

use self::quantize::Quantize;
use crate::{isa::Isa, pool::ThreadPool};

/// Elements of a row that share a scale.
pub(crate) const GROUP: usize = 32;

/// Rows that lie interleaved, at most.
pub(crate) const SIDE: usize = 16;

/// Which forms of the activations the weights need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActivationForms {
    /// Bytes with scales, for integer weights.
    pub(crate) bytes: bool,
    /// bf16, for bf16 weights.
    pub(crate) bf16: bool,
}

impl ActivationForms {
    /// Both demands together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { bytes: self.bytes || other.bytes, bf16: self.bf16 || other.bf16 }
    }
}

/// How finely activations are rounded where they meet integer weights.
///
/// A group's error is at most half of its scale, so a row's comes from its few groups of large numbers, and these are worth a
/// second byte. Which ones they are depends on the row alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rounding {
    /// A group is wide if the square of its largest magnitude is more than so many times the mean of its row's groups.
    wide_above: f32,
}

impl Rounding {
    /// 8 bits.
    pub const INT8: Self = Self { wide_above: f32::INFINITY };

    /// 15 bits.
    pub const INT15: Self = Self { wide_above: 0.0 };

    /// 15 bits for groups whose largest magnitude, squared, is more than `times` the mean of the row's groups; 8 for the others.
    #[must_use]
    pub const fn wide_above(times: f32) -> Self {
        Self { wide_above: times }
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
    /// Of wide groups the high bytes.
    pub(crate) bytes: Vec<i8>,
    /// Of wide groups the low bytes, -64 to 64.
    pub(crate) low: Vec<i8>,
    /// `[rows / 16, groups]`: the rows of sixteen whose group is wide, a bit for each.
    pub(crate) wide: Vec<u16>,
    /// One a group.
    pub(crate) scales: Vec<f32>,
    /// -8 times the sum of a group's numbers.
    pub(crate) zero8: Vec<i32>,
    /// -128 times the sum of a group's numbers.
    pub(crate) zero128: Vec<i32>,
    /// -128 times the sum of each half group's numbers: those of the first halves of sixteen rows, then of the second.
    pub(crate) zero128_halves: Vec<i32>,
    /// Scale times the sum of a group's numbers.
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
    pub(crate) fn holds(&self, forms: ActivationForms) -> bool {
        let bytes = self.quantized == self.rows;
        let bf16 = self.bf16.len() == self.rows * self.pairs();
        (bytes || !forms.bytes) && (bf16 || !forms.bf16)
    }

    /// Computes `forms` of every row; whole numbers are rounded as `rounding` says.
    pub fn prepare(&mut self, pool: &mut ThreadPool, isa: Isa, forms: ActivationForms, rounding: Rounding) {
        if forms.bytes {
            self.quantize(pool, isa, rounding);
        }
        if forms.bf16 {
            self.round_to_bf16();
        }
    }

    fn quantize(&mut self, pool: &mut ThreadPool, isa: Isa, rounding: Rounding) {
        assert!(self.width.is_multiple_of(GROUP), "integer weights have rows of whole groups");
        let (groups, sides) = (self.groups(), self.rows.div_ceil(SIDE));
        let all = self.rows * groups;
        grow(&mut self.bytes, all * GROUP);
        grow(&mut self.low, all * GROUP);
        grow(&mut self.wide, sides * groups);
        grow(&mut self.scales, all);
        grow(&mut self.sums, all);
        grow(&mut self.zero8, all);
        grow(&mut self.zero128, all);
        grow(&mut self.zero128_halves, 2 * all);
        let job = Quantize {
            floats: self.floats.as_ptr(),
            bytes: self.bytes.as_mut_ptr(),
            low: self.low.as_mut_ptr(),
            wide: self.wide.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            zero8: self.zero8.as_mut_ptr(),
            zero128: self.zero128.as_mut_ptr(),
            zero128_halves: self.zero128_halves.as_mut_ptr(),
            rows: self.rows,
            groups,
            wide_above: rounding.wide_above / groups as f32,
            first: 0,
            last: 0,
        };
        // Sixteen rows lie among each other, so they are one thread's; few are not worth another's time.
        let chunk = sides.div_ceil(4 * pool.threads()).max(1);
        pool.run(sides.div_ceil(chunk), |i| {
            isa.dispatch(job.over(i * chunk, sides.min((i + 1) * chunk)));
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
