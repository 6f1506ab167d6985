//! Rows of activations, and the forms of them that packed weights are multiplied with.
//!
//! Integer weights are multiplied with integer activations. Each group of 32 elements of a row is scaled by
//! its own largest magnitude to -127..=127. Groups that would dominate the row's error ([`Rounding`]) are
//! scaled to -16319..=16319 instead. Such a *wide* value is two bytes, `128 high + low`, so its products are
//! byte products too. A row also keeps the group sums that the zero points and minima of the weights need, so
//! that neither costs an instruction per element.
//!
//! Sixteen rows are interleaved group by group, and so are the remaining rows. All data that a tile of rows
//! needs of a group is adjacent, at distances known at compile time, so one address suffices.
//!
//! ```text
//! [rows / 16, groups, 16] and [groups, rows % 16]     of 32 bytes, of a scale, of a sum
//! ```
//!
//! For matrix units that multiply bf16, rows are also rounded to tiles of bf16, in the same order.

mod quantize;
mod tiles;

pub(crate) use self::tiles::{TileRow, TiledRows};

use std::ops::Range;

use self::{quantize::Quantize, tiles::RoundToTiles};
use crate::{isa::Isa, pool::ThreadPool};

/// Elements of a row that share a scale.
pub(crate) const GROUP: usize = 32;

/// Maximum number of interleaved rows.
pub(crate) const SIDE: usize = 16;

/// Forms of the activations that the weights need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActivationForms {
    /// Bytes with scales, for integer weights.
    pub(crate) bytes: bool,
    /// bf16, for bf16 weights.
    pub(crate) bf16: bool,
    /// Tiles of bf16, for weights of all packings.
    pub(crate) tiles: bool,
}

impl ActivationForms {
    /// Tiles of bf16, which [`linear_bf16`](crate::linear_bf16) multiplies with weights of any packing.
    pub const BF16_TILES: Self = Self { bytes: false, bf16: false, tiles: true };

    /// Returns the union of both sets of forms.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes || other.bytes,
            bf16: self.bf16 || other.bf16,
            tiles: self.tiles || other.tiles,
        }
    }
}

/// How finely activations are rounded before they meet integer weights.
///
/// A group's error is at most half of its scale, so a row's error comes from its few groups of large values.
/// These groups get a second byte. The choice of groups depends on the row alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rounding {
    /// A group is wide if its squared largest magnitude exceeds `wide_above` times the mean of the row's
    /// groups.
    wide_above: f32,
}

impl Rounding {
    /// 8 bits for every group.
    pub const INT8: Self = Self { wide_above: f32::INFINITY };

    /// 15 bits for every group.
    pub const INT15: Self = Self { wide_above: 0.0 };

    /// Uses 15 bits for groups whose squared largest magnitude exceeds `times` the mean over the row's
    /// groups, and 8 bits for the others.
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
    /// At least `rows * width` elements; the rest is left over from earlier shapes.
    floats: Vec<f32>,
    /// Number of leading rows whose bytes, scales and sums are current.
    quantized: usize,
    /// Number of rows when the bytes were computed, which determines their layout.
    laid_out: usize,
    /// Quantized values; for wide groups the high bytes.
    pub(crate) bytes: Vec<i8>,
    /// Low bytes of wide groups, -64 to 64.
    pub(crate) low: Vec<i8>,
    /// `[rows / 16, groups]`: bit `m` is set if the group is wide in row `m` of the sixteen.
    pub(crate) wide: Vec<u16>,
    pub(crate) scales: Vec<f32>,
    /// -8 times the sum of a group's quantized values.
    pub(crate) zero8: Vec<i32>,
    /// -128 times the sum of a group's quantized values.
    pub(crate) zero128: Vec<i32>,
    /// -32 times the sum of each half group: first halves of sixteen rows, then second halves.
    pub(crate) zero32_halves: Vec<i32>,
    /// Scale times the sum of a group's quantized values.
    pub(crate) sums: Vec<f32>,
    /// Pairs of bf16; a row of odd width is padded with a zero.
    pub(crate) bf16: Vec<u32>,
    /// Number of leading rows whose tiles are current.
    tiled: usize,
    /// Rows of a tile: sixteen, or the number of rows when the tiles were computed if that was smaller.
    tile_rows: usize,
    /// Tiles of bf16, `[rows / 16, groups, 16]`.
    tiles: Vec<TileRow>,
}

impl Activations {
    /// Resizes to `rows` rows of `width` elements. Contents become unspecified; memory is reused.
    pub fn reshape(&mut self, rows: usize, width: usize) {
        self.rows = rows;
        self.width = width;
        self.quantized = 0;
        self.tiled = 0;
        grow(&mut self.floats, rows * width);
    }

    /// Appends `rows`, which must be complete rows. Forms are stale until the next [`Activations::prepare`].
    ///
    /// # Panics
    /// Panics if the length of `rows` is not a multiple of the width.
    pub fn append(&mut self, rows: &[f32]) {
        assert!(rows.len().is_multiple_of(self.width.max(1)), "whole rows of {}", self.width);
        self.floats.truncate(self.rows * self.width);
        self.floats.extend_from_slice(rows);
        self.rows += rows.len() / self.width.max(1);
    }

    /// Drops all rows after the first `rows`, in every form; memory is kept for reuse.
    pub fn truncate(&mut self, rows: usize) {
        self.rows = self.rows.min(rows);
        self.quantized = self.quantized.min(self.rows);
        self.tiled = self.tiled.min(self.rows);
        self.bf16.truncate(self.rows * self.pairs());
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of elements per row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns all elements, row-major.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.floats[..self.rows * self.width]
    }

    /// Returns all elements, row-major. Forms are stale until the next [`Activations::prepare`].
    pub fn values_mut(&mut self) -> &mut [f32] {
        self.tiled = 0;
        &mut self.floats[..self.rows * self.width]
    }

    pub(crate) fn groups(&self) -> usize {
        self.width / GROUP
    }

    /// Returns the position of `row`'s first group among the groups, and the distance to its next group.
    pub(crate) fn place(&self, row: usize) -> (usize, usize) {
        place(row, self.laid_out, self.groups())
    }

    /// Returns the groups of a row in tiles; the last may be incomplete.
    fn tile_groups(&self) -> usize {
        self.width.div_ceil(GROUP)
    }

    /// Returns the rows in tiles of bf16.
    ///
    /// # Panics
    /// Panics unless the tiles are current.
    pub(crate) fn tiled(&self) -> TiledRows<'_> {
        assert!(self.holds(ActivationForms::BF16_TILES), "activations were prepared as tiles of bf16");
        let (rows, tile_rows, groups) = (self.rows, self.tile_rows, self.tile_groups());
        TiledRows { lines: &self.tiles, rows, tile_rows, line_groups: groups, first_group: 0, groups }
    }

    /// Returns the rows of a tile, 1 to 16, and the words of the tiles of `rows`, for another process that
    /// computes with these rows.
    ///
    /// # Panics
    /// Panics unless the tiles are current and the rows begin and end with a tile.
    #[must_use]
    pub fn tile_words(&self, rows: Range<usize>) -> (usize, &[f32]) {
        assert!(self.holds(ActivationForms::BF16_TILES), "activations were prepared as tiles of bf16");
        let of_tile = self.tile_rows * self.tile_groups();
        assert!(
            rows.start.is_multiple_of(self.tile_rows)
                && (rows.end == self.rows || rows.end.is_multiple_of(self.tile_rows)),
            "rows are whole tiles"
        );
        let lines = rows.start / self.tile_rows * of_tile..rows.end.div_ceil(self.tile_rows) * of_tile;
        (self.tile_rows, TileRow::words(&self.tiles[lines]))
    }

    /// Resizes to `rows` rows of `width` elements whose only form is tiles of `tile_rows` rows. Returns the
    /// words of these tiles, to be filled with those of [`Activations::tile_words`].
    ///
    /// # Panics
    /// Panics unless a tile has sixteen rows, or all if there are fewer.
    pub fn reshape_tiled(&mut self, rows: usize, width: usize, tile_rows: usize) -> &mut [f32] {
        assert!(
            tile_rows == SIDE || tile_rows == rows && rows < SIDE,
            "{rows} rows are no tiles of {tile_rows}"
        );
        (self.rows, self.width, self.tile_rows) = (rows, width, tile_rows);
        (self.quantized, self.tiled) = (0, rows);
        let lines = rows.div_ceil(tile_rows) * tile_rows * self.tile_groups();
        grow(&mut self.tiles, lines);
        TileRow::words_mut(&mut self.tiles[..lines])
    }

    pub(crate) fn pairs(&self) -> usize {
        self.width.div_ceil(2)
    }

    /// True if `forms` are computed for all current rows.
    pub(crate) fn holds(&self, forms: ActivationForms) -> bool {
        let bytes = self.quantized == self.rows;
        let bf16 = self.bf16.len() == self.rows * self.pairs();
        let tiles = self.tiled == self.rows;
        (bytes || !forms.bytes) && (bf16 || !forms.bf16) && (tiles || !forms.tiles)
    }

    /// Computes `forms` of every row, without tiles that are current; `rounding` controls the quantized form.
    pub fn prepare(&mut self, pool: &mut ThreadPool, isa: Isa, forms: ActivationForms, rounding: Rounding) {
        if forms.bytes {
            self.quantize(pool, isa, rounding);
        }
        if forms.bf16 {
            self.round_to_bf16();
        }
        if forms.tiles && self.tiled != self.rows {
            self.round_to_tiles(pool, isa);
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
        grow(&mut self.zero32_halves, 2 * all);
        let job = Quantize {
            floats: self.floats.as_ptr(),
            bytes: self.bytes.as_mut_ptr(),
            low: self.low.as_mut_ptr(),
            wide: self.wide.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            zero8: self.zero8.as_mut_ptr(),
            zero128: self.zero128.as_mut_ptr(),
            zero32_halves: self.zero32_halves.as_mut_ptr(),
            rows: self.rows,
            groups,
            wide_above: rounding.wide_above / groups as f32,
            first: 0,
            last: 0,
        };
        // Sixteen interleaved rows belong to one thread; a small batch is not worth waking another thread.
        let chunk = sides.div_ceil(4 * pool.threads()).max(1);
        pool.run(sides.div_ceil(chunk), |i| {
            isa.dispatch(job.over(i * chunk, sides.min((i + 1) * chunk)));
        });
        (self.quantized, self.laid_out) = (self.rows, self.rows);
    }

    fn round_to_tiles(&mut self, pool: &mut ThreadPool, isa: Isa) {
        self.tile_rows = SIDE.min(self.rows).max(1);
        let tiles = self.rows.div_ceil(self.tile_rows);
        let lines = tiles * self.tile_rows * self.tile_groups();
        grow(&mut self.tiles, lines);
        let job = RoundToTiles {
            floats: self.floats.as_ptr(),
            tiles: self.tiles.as_mut_ptr(),
            rows: self.rows,
            width: self.width,
            first: 0,
            last: 0,
        };
        // A small batch is not worth waking another thread.
        let chunk = tiles.div_ceil(4 * pool.threads()).max(1);
        pool.run(tiles.div_ceil(chunk), |i| {
            isa.dispatch(job.over(i * chunk, tiles.min((i + 1) * chunk)));
        });
        self.tiled = self.rows;
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

/// Grows `values` to at least `len` elements and never shrinks it.
fn grow<T: Copy + Default>(values: &mut Vec<T>, len: usize) {
    if values.len() < len {
        values.resize(len, T::default());
    }
}

/// Returns the position of `row`'s first group among `rows` rows, and the distance to its next group.
#[inline(always)]
fn place(row: usize, rows: usize, groups: usize) -> (usize, usize) {
    let first = row / SIDE * SIDE;
    (first * groups + row % SIDE, SIDE.min(rows - first))
}

/// Converts a position among groups into a position among half groups.
#[inline(always)]
pub(crate) fn place_of_halves(start: usize) -> usize {
    2 * start - start % SIDE
}
