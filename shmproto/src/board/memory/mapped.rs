//! Board memory as atomics over a mapped region, or over the heap.

use super::{AtomicU32, AtomicU64, Header, SliceEntry, SlotEntry};
use crate::board::Geometry;
use crate::board::layout::SEATS_OFFSET;
use crate::memory::AtomicMemory;
use crate::region::Region;

/// Control region: header, worker slots, slices.
#[derive(Debug)]
pub(in crate::board) struct Control {
    memory: AtomicMemory,
    seats: usize,
    slices: usize,
}

impl Control {
    pub(in crate::board) fn on_heap(geometry: &Geometry) -> Self {
        Self::over(AtomicMemory::on_heap(geometry.control_bytes()), geometry)
    }

    /// Uses a region if it is large enough for the tables.
    pub(in crate::board) fn mapped(region: Region, geometry: &Geometry) -> Option<Self> {
        let memory = AtomicMemory::mapped(region);
        (memory.bytes() >= geometry.control_bytes()).then(|| Self::over(memory, geometry))
    }

    /// Uses the same region with the tables of another geometry, if it is large enough for them.
    pub(in crate::board) fn resized(self, geometry: &Geometry) -> Option<Self> {
        (self.memory.bytes() >= geometry.control_bytes()).then(|| Self::over(self.memory, geometry))
    }

    fn over(memory: AtomicMemory, geometry: &Geometry) -> Self {
        Self { memory, seats: geometry.seats, slices: geometry.slices }
    }

    pub(in crate::board) fn header(&self) -> &Header {
        // SAFETY: a Header consists of atomics and padding.
        unsafe { &self.memory.at(0, 1)[0] }
    }

    pub(in crate::board) fn seats(&self) -> &[SlotEntry] {
        // SAFETY: a SlotEntry consists of atomics and padding.
        unsafe { self.memory.at(SEATS_OFFSET, self.seats) }
    }

    pub(in crate::board) fn slices(&self) -> &[SliceEntry] {
        // SAFETY: a SliceEntry consists of atomics and padding.
        unsafe { self.memory.at(Geometry::slices_offset(self.seats), self.slices) }
    }

    pub(in crate::board) fn region(&self) -> Option<&Region> {
        self.memory.region()
    }
}

/// Slab of f32 values that another process may write, or read while they are written.
#[derive(Debug)]
pub(in crate::board) struct Slab {
    memory: AtomicMemory,
    pairs: usize,
}

impl Slab {
    pub(in crate::board) fn on_heap(elements: usize) -> Self {
        Self { memory: AtomicMemory::on_heap(elements * 4), pairs: elements.div_ceil(2) }
    }

    /// Uses a region if it is large enough. A slab that is only read may be mapped read-only.
    pub(in crate::board) fn mapped(region: Region, elements: usize) -> Option<Self> {
        let memory = AtomicMemory::mapped(region);
        let pairs = elements.div_ceil(2);
        (memory.bytes() / 8 >= pairs).then_some(Self { memory, pairs })
    }

    /// Returns the elements in pairs, to be read.
    pub(super) fn pairs(&self) -> &[AtomicU64] {
        // SAFETY: these are atomics; a read-only mapping is only loaded from.
        unsafe { self.memory.at(0, self.pairs) }
    }

    /// Returns the elements in pairs, to be written; panics if the region is mapped read-only.
    pub(super) fn pairs_to_write(&self) -> &[AtomicU64] {
        if let Some(region) = self.region() {
            // This call panics if the mapping is read-only.
            let _ = region.words();
        }
        self.pairs()
    }

    /// Returns the elements as words, to be written; panics if the region is mapped read-only.
    pub(in crate::board) fn words_to_write(&self) -> &[AtomicU32] {
        // SAFETY: these are atomics; `pairs_to_write` has checked that they may be written.
        unsafe { self.memory.at(0, 2 * self.pairs_to_write().len()) }
    }

    pub(in crate::board) fn region(&self) -> Option<&Region> {
        self.memory.region()
    }
}
