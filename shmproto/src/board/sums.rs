//! The sums of a slice, where its worker has put them.

use std::{ops::Range, sync::Arc};

use super::memory::Slab;

/// Sums that are done: `[rows, columns]`. Any thread may copy any part; a worker that means harm changes what it has summed
/// itself, and nothing else.
#[derive(Debug)]
pub struct SliceSums {
    slab: Arc<Slab>,
    range: Range<usize>,
}

impl SliceSums {
    pub(super) fn new(slab: Arc<Slab>, range: Range<usize>) -> Self {
        Self { slab, range }
    }

    /// How many numbers there are.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a slice has rows")]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Copies numbers out, from number `start` on.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn read(&self, start: usize, to: &mut [f32]) {
        assert!(start + to.len() <= self.len(), "numbers of this slice");
        self.slab.read(self.range.start + start, to);
    }
}
