//! Atomics over a mapped region, or over the heap.

use super::{AtomicU32, AtomicU64, Header, SliceEntry, SlotEntry};
use crate::board::Geometry;
use crate::board::layout::SEATS_OFFSET;
use crate::memory::AtomicMemory;
use crate::region::Region;

/// The control region: header, seats, slices.
#[derive(Debug)]
pub(in crate::board) struct Control {
    memory: AtomicMemory,
    seats: usize,
    slices: usize,
}

impl Control {
    /// Zeros on the heap.
    pub(in crate::board) fn on_heap(geometry: &Geometry) -> Self {
        Self::over(AtomicMemory::on_heap(geometry.control_bytes()), geometry)
    }

    /// A region, if it is large enough for the tables.
    pub(in crate::board) fn mapped(region: Region, geometry: &Geometry) -> Option<Self> {
        let memory = AtomicMemory::mapped(region);
        (memory.bytes() >= geometry.control_bytes()).then(|| Self::over(memory, geometry))
    }

    /// The same region with the tables of another geometry, if it is large enough for them.
    pub(in crate::board) fn resized(self, geometry: &Geometry) -> Option<Self> {
        (self.memory.bytes() >= geometry.control_bytes()).then(|| Self::over(self.memory, geometry))
    }

    fn over(memory: AtomicMemory, geometry: &Geometry) -> Self {
        Self { memory, seats: geometry.seats, slices: geometry.slices }
    }

    pub(in crate::board) fn header(&self) -> &Header {
        // SAFETY: a Header is atomics and padding.
        unsafe { &self.memory.at(0, 1)[0] }
    }

    pub(in crate::board) fn seats(&self) -> &[SlotEntry] {
        // SAFETY: a SeatEntry is atomics and padding.
        unsafe { self.memory.at(SEATS_OFFSET, self.seats) }
    }

    pub(in crate::board) fn slices(&self) -> &[SliceEntry] {
        // SAFETY: a SliceEntry is atomics and padding.
        unsafe { self.memory.at(Geometry::slices_offset(self.seats), self.slices) }
    }

    pub(in crate::board) fn region(&self) -> Option<&Region> {
        self.memory.region()
    }
}

/// Numbers that others may write, or read while they are written.
#[derive(Debug)]
pub(in crate::board) struct Slab {
    memory: AtomicMemory,
    pairs: usize,
}

impl Slab {
    /// Zeros on the heap.
    pub(in crate::board) fn on_heap(elements: usize) -> Self {
        Self { memory: AtomicMemory::on_heap(elements * 4), pairs: elements.div_ceil(2) }
    }

    /// A region, if it is large enough. It may be mapped read-only where it is only read.
    pub(in crate::board) fn mapped(region: Region, elements: usize) -> Option<Self> {
        let memory = AtomicMemory::mapped(region);
        let pairs = elements.div_ceil(2);
        (memory.bytes() / 8 >= pairs).then_some(Self { memory, pairs })
    }

    /// The numbers in pairs, to read.
    pub(super) fn pairs(&self) -> &[AtomicU64] {
        // SAFETY: these are atomics; what is mapped read-only is loaded only.
        unsafe { self.memory.at(0, self.pairs) }
    }

    /// The numbers in pairs, to write; panics where the region was mapped to be read.
    pub(super) fn pairs_to_write(&self) -> &[AtomicU64] {
        if let Some(region) = self.region() {
            // It asks just that.
            let _ = region.words();
        }
        self.pairs()
    }

    /// The numbers as words, to write; panics where the region was mapped to be read.
    pub(in crate::board) fn words_to_write(&self) -> &[AtomicU32] {
        // SAFETY: these are atomics; that they may be written was asked just now.
        unsafe { self.memory.at(0, 2 * self.pairs_to_write().len()) }
    }

    pub(in crate::board) fn region(&self) -> Option<&Region> {
        self.memory.region()
    }
}
