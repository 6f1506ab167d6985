//! Messages of a round trip, and the trait of the transports that carry them.

use anyhow::{Context, Result};
use shmproto::board::Slice;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowShare {
    /// Each worker gets its part of the rows and returns their sums.
    OwnRows,
    /// Each worker gets all rows and returns its part of the columns of the sums.
    AllRows,
}

impl RowShare {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::OwnRows => "each its own rows",
            Self::AllRows => "each all rows",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MessageShape {
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) share: RowShare,
}

impl MessageShape {
    pub(super) fn x_bytes(&self, workers: usize) -> usize {
        match self.share {
            RowShare::OwnRows => self.sums_bytes(workers),
            RowShare::AllRows => self.rows * self.width * 4,
        }
    }

    pub(super) fn sums_bytes(&self, workers: usize) -> usize {
        self.rows * self.width * 4 / workers
    }

    /// Offset in the rows where the part of worker `index` begins, in bytes.
    pub(super) fn first_byte(&self, index: usize, workers: usize) -> usize {
        match self.share {
            RowShare::OwnRows => index * self.sums_bytes(workers),
            RowShare::AllRows => 0,
        }
    }

    pub(super) fn slices(&self, workers: usize) -> Result<Vec<Slice>> {
        let number = |value: usize| u32::try_from(value).context("sizes of a board are 32 bits");
        let share = self.rows * self.width / workers;
        let rows = match self.share {
            RowShare::OwnRows => self.rows / workers,
            RowShare::AllRows => self.rows,
        };
        (0..workers)
            .map(|index| {
                let first = self.first_byte(index, workers) / 4 / self.width;
                Ok(Slice {
                    image: 1,
                    module: 0,
                    first_row: number(first)?,
                    rows: number(rows)?,
                    width: number(self.width)?,
                    first_rank: 0,
                    last_rank: 16,
                    x_offset: 0,
                    sums_offset: (index * share) as u64,
                    sums_elements: number(share)?,
                })
            })
            .collect()
    }
}

pub(super) trait RoundTrip {
    fn begin(&mut self) {}

    fn trip(&mut self, x: &[f32]) -> Result<()>;

    fn end(&mut self) {}

    /// Returns sum `index` of the last trip.
    fn sums(&self, index: usize) -> f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slices_of_a_job_cover_every_sum_once_and_every_row() {
        for (share, workers) in [(RowShare::OwnRows, 4), (RowShare::AllRows, 8), (RowShare::OwnRows, 1)] {
            let shape = MessageShape { rows: 16, width: 4096, share };
            let slices = shape.slices(workers).unwrap();
            let mut end = 0;
            for slice in &slices {
                assert_eq!(slice.sums_offset, end);
                end += u64::from(slice.sums_elements);
            }
            assert_eq!(end, (16 * 4096) as u64);
            let rows: u32 = slices.iter().map(|slice| slice.rows).sum();
            let each = if share == RowShare::AllRows { workers } else { 1 };
            assert_eq!(rows as usize, 16 * each);
        }
    }
}
