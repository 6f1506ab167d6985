//! The split of partial sums into slices of rows.

use std::ops::Range;

use kernels::lora::LeadingSegment;
use model::deltas::assist::PartialSum;
use shmproto::board::Slice;

use crate::adapter_images::module;

/// Minimum and maximum number of rows of a slice.
const SLICE_ROWS: Range<usize> = 16..64;

/// Number of slices per worker, so that a slow worker delays little.
const SLICES_A_WORKER: usize = 4;

/// Some rows of a partial sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WorkSplit {
    pub(super) ask: usize,
    /// First row within the partial sum.
    pub(super) first: usize,
    pub(super) rows: usize,
}

impl WorkSplit {
    /// Returns the first element of the split's sums.
    fn offset(self, asks: &[PartialSum<'_>]) -> usize {
        let ask = &asks[self.ask];
        ask.offset + self.first * ask.matrix.rows()
    }

    pub(super) fn elements(self, asks: &[PartialSum<'_>]) -> Range<usize> {
        let first = self.offset(asks);
        first..first + self.rows * asks[self.ask].matrix.rows()
    }

    /// Returns the split's rows, as the partial sums count them.
    pub(super) fn rows(self, asks: &[PartialSum<'_>]) -> Range<usize> {
        let first = asks[self.ask].first_row + self.first;
        first..first + self.rows
    }

    pub(super) fn rank_rows(self, asks: &[PartialSum<'_>]) -> u64 {
        (self.rows * asks[self.ask].ranks) as u64
    }

    /// Returns the number of multiply-adds.
    pub(super) fn work(self, asks: &[PartialSum<'_>]) -> u64 {
        let matrix = asks[self.ask].matrix;
        self.rank_rows(asks) * (matrix.columns() + matrix.rows()) as u64
    }

    pub(super) fn segment<'a>(self, asks: &[PartialSum<'a>]) -> LeadingSegment<'a> {
        let PartialSum { first_row, matrix, ranks, .. } = asks[self.ask];
        let offset = self.offset(asks);
        LeadingSegment { first_row: first_row + self.first, rows: self.rows, matrix, ranks, offset }
    }
}

/// Returns the rows per slice: enough slices for all workers, and none too small to be worth a claim.
pub(super) fn slice_rows(asks: &[PartialSum<'_>], workers: usize) -> usize {
    let rows: usize = asks.iter().map(|ask| ask.rows).sum();
    (rows / (SLICES_A_WORKER * workers.max(1))).clamp(SLICE_ROWS.start, SLICE_ROWS.end)
}

pub(super) fn slice(
    ask: &PartialSum<'_>,
    share: WorkSplit,
    width: usize,
    x_offset: usize,
    sums_offset: usize,
) -> Option<Slice> {
    Some(Slice {
        image: ask.adapter.image().0,
        module: module(ask.layer, ask.target),
        first_row: u32::try_from(share.first).ok()?,
        rows: u32::try_from(share.rows).ok()?,
        width: u32::try_from(width).ok()?,
        first_rank: 0,
        last_rank: u32::try_from(ask.ranks).ok()?,
        x_offset: u32::try_from(x_offset).ok()?,
        sums_offset: sums_offset as u64,
        sums_elements: u32::try_from(share.rows * ask.matrix.rows()).ok()?,
    })
}
