//! One piece of a job: what it asks for, checked against the board it stands on.

use std::ops::Range;

use thiserror::Error;

use super::Geometry;
use super::layout::Descriptor;
use crate::atomic::Ordering::Relaxed;

/// Highest rank of an adapter that a slice may name.
pub const MAX_RANK: u32 = 1024;

/// Where sums may begin: at multiples of so many numbers, a cache line, so that two workers never share one.
pub const SUMS_ALIGN: usize = 16;

/// What a worker is asked to sum: ranks `first_rank..last_rank` of one matrix, for some rows of x.
///
/// Row `r` of the slice is `x[x_offset + (first_row + r) * width ..][.. width]` of the slab. The sums are
/// `[rows, sums_elements / rows]`, at `sums_offset` of the seat's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// Number of the adapter's image.
    pub image: u64,
    /// Which matrix of the adapter: `layer * 8 + target`.
    pub module: u32,
    /// First row of x.
    pub first_row: u32,
    /// Rows of x, and of the sums.
    pub rows: u32,
    /// Numbers in a row of x.
    pub width: u32,
    /// First rank to sum.
    pub first_rank: u32,
    /// One past the last rank to sum.
    pub last_rank: u32,
    /// Where in the slab row 0 of x begins, in numbers.
    pub x_offset: u32,
    /// Where in the seat's region the sums begin, in numbers; a multiple of [`SUMS_ALIGN`].
    pub sums_offset: u64,
    /// Numbers of the sums: rows x columns of the result.
    pub sums_elements: u32,
}

/// Why a slice cannot stand on this board.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SliceError {
    /// Nothing to do.
    #[error("a slice of no rows")]
    NoRows,
    /// Rows of nothing.
    #[error("a slice whose rows have no numbers")]
    NoWidth,
    /// Ranks in the wrong order, none, or more than an adapter may have.
    #[error("ranks {first}..{last} are no range within {MAX_RANK}")]
    Ranks {
        /// First rank.
        first: u32,
        /// One past the last.
        last: u32,
    },
    /// The rows reach past the slab.
    #[error("the rows reach past the {limit} numbers of x")]
    OutsideX {
        /// Numbers in the slab.
        limit: usize,
    },
    /// The sums do not begin on a cache line.
    #[error("the sums begin at {offset}, which is no multiple of {SUMS_ALIGN}")]
    Unaligned {
        /// Where they begin.
        offset: u64,
    },
    /// The sums do not divide into the rows.
    #[error("{elements} sums do not divide into {rows} rows")]
    Uneven {
        /// Numbers of the sums.
        elements: u32,
        /// Rows of the slice.
        rows: u32,
    },
    /// The sums reach past a seat's region.
    #[error("the sums reach past the {limit} numbers of a seat's region")]
    OutsideSums {
        /// Numbers in a seat's region.
        limit: usize,
    },
}

impl Slice {
    /// Checks every field against the board.
    ///
    /// # Errors
    ///
    /// The first field that is wrong.
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

    /// One past the last number of x, if that is a number at all.
    fn x_end(&self) -> Option<u64> {
        let rows = u64::from(self.first_row) + u64::from(self.rows);
        rows.checked_mul(u64::from(self.width))?.checked_add(u64::from(self.x_offset))
    }

    /// Numbers of the slab that the slice reads. For a slice that was checked.
    pub(super) fn x_range(&self) -> Range<usize> {
        let start = self.x_offset as usize + self.first_row as usize * self.width as usize;
        start..start + self.x_elements()
    }

    /// Numbers of the seat's region that the slice writes. For a slice that was checked.
    pub(super) fn sums_range(&self) -> Range<usize> {
        // It is below the region's length, which is a usize.
        #[allow(clippy::cast_possible_truncation, reason = "checked against a usize")]
        let start = self.sums_offset as usize;
        start..start + self.sums_elements as usize
    }

    /// Numbers of x that the slice reads: rows x width.
    #[must_use]
    pub fn x_elements(&self) -> usize {
        self.rows as usize * self.width as usize
    }

    /// The work there is in it: rows x ranks.
    #[must_use]
    pub fn rank_rows(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.last_rank.saturating_sub(self.first_rank))
    }
}

impl Descriptor {
    /// Writes the slice down. Its state word, stored after, hands it over.
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

    /// Copies what stands there: once, so that what is checked is what is used.
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
