//! Atomics over a mapped region, or over the heap.

use std::ptr::NonNull;
use std::slice;

use super::{AtomicU64, Header, SeatEntry, SliceEntry};
use crate::board::Geometry;
use crate::board::layout::{LINE_BYTES, SEATS_OFFSET};
use crate::region::Region;

/// A cache line of the heap.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct Line([AtomicU64; LINE_BYTES / 8]);

/// Where the bytes are. Neither moves nor shrinks while this lives.
#[derive(Debug)]
enum Owner {
    Region(Region),
    Heap { _lines: Box<[Line]> },
}

/// Bytes that others may write at any moment, aligned to a cache line.
#[derive(Debug)]
struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    owner: Owner,
}

// SAFETY: 1. `base` points into `owner`, which is Send and Sync itself and travels with it. 2. The bytes are reached
// through atomics only.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    fn on_heap(bytes: usize) -> Self {
        let lines: Box<[Line]> = (0..bytes.div_ceil(LINE_BYTES)).map(|_| Line::default()).collect();
        let base = NonNull::from(&*lines).cast();
        Self { base, bytes: lines.len() * LINE_BYTES, owner: Owner::Heap { _lines: lines } }
    }

    fn mapped(region: Region) -> Self {
        // Made of atomics, so writing through it is allowed where the mapping allows it.
        let base = NonNull::from(region.read_words()).cast();
        Self { base, bytes: region.bytes(), owner: Owner::Region(region) }
    }

    /// `count` values of `T` from byte `offset` on.
    ///
    /// # Safety
    ///
    /// `T` consists of atomics and padding only: any bytes are a `T`, and others may change them.
    unsafe fn at<T>(&self, offset: usize, count: usize) -> &[T] {
        let end = count.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        assert!(end.is_some_and(|end| end <= self.bytes), "past the end of a board's memory");
        assert!(
            (self.base.addr().get() + offset).is_multiple_of(align_of::<T>()),
            "a board's memory is not aligned"
        );
        // SAFETY: 1. In bounds and aligned: asserted above. 2. The bytes live as long as `self`, which owns them.
        // 3. Any bytes are a T, and changes by others are allowed: the caller's promise.
        unsafe { slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) }
    }

    fn region(&self) -> Option<&Region> {
        match &self.owner {
            Owner::Region(region) => Some(region),
            Owner::Heap { .. } => None,
        }
    }
}

/// The control region: header, seats, slices.
#[derive(Debug)]
pub(in crate::board) struct Control {
    memory: Memory,
    seats: usize,
    slices: usize,
}

impl Control {
    /// Zeros on the heap.
    pub(in crate::board) fn on_heap(geometry: &Geometry) -> Self {
        Self::over(Memory::on_heap(geometry.control_bytes()), geometry)
    }

    /// A region, if it is large enough for the tables.
    pub(in crate::board) fn mapped(region: Region, geometry: &Geometry) -> Option<Self> {
        let memory = Memory::mapped(region);
        (memory.bytes >= geometry.control_bytes()).then(|| Self::over(memory, geometry))
    }

    /// The same region with the tables of another geometry, if it is large enough for them.
    pub(in crate::board) fn resized(self, geometry: &Geometry) -> Option<Self> {
        (self.memory.bytes >= geometry.control_bytes()).then(|| Self::over(self.memory, geometry))
    }

    fn over(memory: Memory, geometry: &Geometry) -> Self {
        Self { memory, seats: geometry.seats, slices: geometry.slices }
    }

    pub(in crate::board) fn header(&self) -> &Header {
        // SAFETY: a Header is atomics and padding.
        unsafe { &self.memory.at(0, 1)[0] }
    }

    pub(in crate::board) fn seats(&self) -> &[SeatEntry] {
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
    memory: Memory,
    pairs: usize,
}

impl Slab {
    /// Zeros on the heap.
    pub(in crate::board) fn on_heap(elements: usize) -> Self {
        Self { memory: Memory::on_heap(elements * 4), pairs: elements.div_ceil(2) }
    }

    /// A region, if it is large enough. It may be mapped read-only where it is only read.
    pub(in crate::board) fn mapped(region: Region, elements: usize) -> Option<Self> {
        let memory = Memory::mapped(region);
        let pairs = elements.div_ceil(2);
        (memory.bytes / 8 >= pairs).then_some(Self { memory, pairs })
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

    pub(in crate::board) fn region(&self) -> Option<&Region> {
        self.memory.region()
    }
}
