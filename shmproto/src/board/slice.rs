//! Slice of a job: its request, and the checks against the board.

use std::ops::Range;

use thiserror::Error;

use super::Geometry;
use super::layout::Descriptor;
use crate::atomic::Ordering::Relaxed;

/// Highest rank of an adapter that a slice may name.
pub const MAX_RANK: u32 = 1024;

/// Alignment of sums in elements: one cache line, so that two workers never share one.
pub const SUMS_ALIGN: usize = 16;

/// Request to a worker: sum the ranks `first_rank..last_rank` of one matrix for some rows of x.
///
/// Row `r` of the slice is `x[x_offset + (first_row + r) * width ..][.. width]` of the slab. The sums are
/// `[rows, sums_elements / rows]`, at `sums_offset` of the worker slot's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// Number of the adapter's image.
    pub image: u64,
    /// Number of the adapter's matrix: `layer * 8 + target`.
    pub module: u32,
    /// Index of the first row of x.
    pub first_row: u32,
    /// Number of rows of x, and of the sums.
    pub rows: u32,
    /// Number of elements in a row of x.
    pub width: u32,
    /// First rank to sum.
    pub first_rank: u32,
    /// One past the last rank to sum.
    pub last_rank: u32,
    /// Index of row 0 of x in the slab, in elements.
    pub x_offset: u32,
    /// Index of the first sum in the worker slot's region, in elements; a multiple of [`SUMS_ALIGN`].
    pub sums_offset: u64,
    /// Number of sums: rows x columns of the result.
    pub sums_elements: u32,
}

/// Error of a slice that does not fit the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SliceError {
    /// The slice has no rows.
    #[error("a slice of no rows")]
    NoRows,
    /// The rows of the slice have no elements.
    #[error("a slice whose rows have no numbers")]
    NoWidth,
    /// The ranks are in the wrong order, empty, or beyond [`MAX_RANK`].
    #[error("ranks {first}..{last} are no range within {MAX_RANK}")]
    Ranks {
        /// First rank of the range.
        first: u32,
        /// One past the last rank.
        last: u32,
    },
    /// The rows reach past the end of the slab.
    #[error("the rows reach past the {limit} numbers of x")]
    OutsideX {
        /// Number of elements in the slab.
        limit: usize,
    },
    /// The sums do not begin at a cache line.
    #[error("the sums begin at {offset}, which is no multiple of {SUMS_ALIGN}")]
    Unaligned {
        /// Index of the first sum, in elements.
        offset: u64,
    },
    /// The number of sums is not a multiple of the number of rows.
    #[error("{elements} sums do not divide into {rows} rows")]
    Uneven {
        /// Number of sums in the slice.
        elements: u32,
        /// Number of rows of the slice.
        rows: u32,
    },
    /// The sums reach past the worker slot's region.
    #[error("the sums reach past the {limit} numbers of a seat's region")]
    OutsideSums {
        /// Number of elements in the region.
        limit: usize,
    },
}

impl Slice {
    /// Checks every field against the board's geometry.
    ///
    /// # Errors
    /// Returns the first field that is wrong.
    pub fn check(&self, geometry: &Geometry) -> Result<(), SliceError> {
        if self.rows == 0 {
            return Err(SliceError::NoRows);
        }
        if self.width == 0 {
            return Err(SliceError::NoWidth);
        }
        if self.first_rank >= self.last_rank || self.last_rank > MAX_RANK {
            return Err(SliceError::Ranks { first: self.first_rank, last: self.last_rank });
        }
        if self.x_end().is_none_or(|end| end > geometry.x_elements as u64) {
            return Err(SliceError::OutsideX { limit: geometry.x_elements });
        }
        self.check_sums(geometry)
    }

    fn check_sums(&self, geometry: &Geometry) -> Result<(), SliceError> {
        if !self.sums_offset.is_multiple_of(SUMS_ALIGN as u64) {
            return Err(SliceError::Unaligned { offset: self.sums_offset });
        }
        if self.sums_elements == 0 || !self.sums_elements.is_multiple_of(self.rows) {
            return Err(SliceError::Uneven { elements: self.sums_elements, rows: self.rows });
        }
        let end = self.sums_offset.checked_add(u64::from(self.sums_elements));
        if end.is_none_or(|end| end > geometry.sums_elements as u64) {
            return Err(SliceError::OutsideSums { limit: geometry.sums_elements });
        }
        Ok(())
    }

    /// Returns one past the last element of x; `None` on overflow.
    fn x_end(&self) -> Option<u64> {
        let rows = u64::from(self.first_row) + u64::from(self.rows);
        rows.checked_mul(u64::from(self.width))?.checked_add(u64::from(self.x_offset))
    }

    /// Returns the slab elements that the slice reads; the slice must have been checked.
    pub(super) fn x_range(&self) -> Range<usize> {
        let start = self.x_offset as usize + self.first_row as usize * self.width as usize;
        start..start + self.x_elements()
    }

    /// Returns the region elements that the slice writes; the slice must have been checked.
    pub(super) fn sums_range(&self) -> Range<usize> {
        // The offset is below the region's length, which is a usize.
        #[allow(clippy::cast_possible_truncation, reason = "checked against a usize")]
        let start = self.sums_offset as usize;
        start..start + self.sums_elements as usize
    }

    /// Returns the number of elements of x that the slice reads: rows x width.
    #[must_use]
    pub fn x_elements(&self) -> usize {
        self.rows as usize * self.width as usize
    }

    /// Returns the amount of work: rows x ranks.
    #[must_use]
    pub fn rank_rows(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.last_rank.saturating_sub(self.first_rank))
    }
}

impl Descriptor {
    /// Writes the slice. The state word, stored afterwards, publishes it.
    pub(super) fn write(&self, slice: &Slice) {
        self.image.store(slice.image, Relaxed);
        self.sums_offset.store(slice.sums_offset, Relaxed);
        self.module.store(slice.module, Relaxed);
        self.first_row.store(slice.first_row, Relaxed);
        self.rows.store(slice.rows, Relaxed);
        self.width.store(slice.width, Relaxed);
        self.first_rank.store(slice.first_rank, Relaxed);
        self.last_rank.store(slice.last_rank, Relaxed);
        self.x_offset.store(slice.x_offset, Relaxed);
        self.sums_elements.store(slice.sums_elements, Relaxed);
    }

    /// Copies the slice once, so that the checked values are the used ones.
    pub(super) fn copy(&self) -> Slice {
        Slice {
            image: self.image.load(Relaxed),
            module: self.module.load(Relaxed),
            first_row: self.first_row.load(Relaxed),
            rows: self.rows.load(Relaxed),
            width: self.width.load(Relaxed),
            first_rank: self.first_rank.load(Relaxed),
            last_rank: self.last_rank.load(Relaxed),
            x_offset: self.x_offset.load(Relaxed),
            sums_offset: self.sums_offset.load(Relaxed),
            sums_elements: self.sums_elements.load(Relaxed),
        }
    }
}
