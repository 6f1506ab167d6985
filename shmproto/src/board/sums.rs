//! The sums of a done slice, in its worker's region.

use std::{ops::Range, sync::Arc};

use super::memory::Slab;

/// Sums of a done slice: `[rows, columns]`. Any thread may copy any part. A malicious worker can change only
/// the sums that it computed itself.
#[derive(Debug)]
pub struct SliceSums {
    slab: Arc<Slab>,
    range: Range<usize>,
}

impl SliceSums {
    pub(super) fn new(slab: Arc<Slab>, range: Range<usize>) -> Self {
        Self { slab, range }
    }

    /// Returns the number of sums in the slice.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a slice has rows")]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Copies sums to `to`, from element `start` on.
    ///
    /// # Panics
    /// Panics if the slice ends before `to` is full.
    pub fn read(&self, start: usize, to: &mut [f32]) {
        assert!(start + to.len() <= self.len(), "numbers of this slice");
        self.slab.read(self.range.start + start, to);
    }
}
