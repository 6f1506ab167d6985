//! Memory of a board as atomics: the control region, and the slabs of f32 values.
//!
//! Memory that another process may write is never accessed through `&` or `&mut` of plain data. Both types
//! here give out atomics only, over a region's mapping or, in one process, over the heap. Under loom there
//! are no bytes: loom's atomics are objects, and are stored as such.

#[cfg(not(loom))]
pub(super) use self::mapped::{Control, Slab};
#[cfg(loom)]
pub(super) use self::modelled::{Control, Slab};

use super::layout::{Header, SliceEntry, SlotEntry};
#[cfg(not(loom))]
use crate::atomic::AtomicU32;
use crate::atomic::AtomicU64;
use crate::memory::copy;

impl Slab {
    /// Copies `values` in from element `start` on, which must be even; panics if they do not fit.
    pub(super) fn write(&self, start: usize, values: &[f32]) {
        copy::write(self.pairs_to_write(), start, values);
    }

    /// Copies elements out from element `start` on; panics if the slab ends before `values` is full.
    pub(super) fn read(&self, start: usize, values: &mut [f32]) {
        copy::read(self.pairs(), start, values);
    }
}

#[cfg(not(loom))]
mod mapped;

/// Variants for loom, whose atomics are objects of its model and cannot be cast from bytes.
#[cfg(loom)]
mod modelled {
    use super::{AtomicU64, Header, SliceEntry, SlotEntry};
    use crate::board::Geometry;

    #[derive(Debug)]
    pub(in crate::board) struct Control {
        header: Header,
        seats: Vec<SlotEntry>,
        slices: Vec<SliceEntry>,
    }

    impl Control {
        pub(in crate::board) fn on_heap(geometry: &Geometry) -> Self {
            Self {
                header: Header::default(),
                seats: (0..geometry.seats).map(|_| SlotEntry::default()).collect(),
                slices: (0..geometry.slices).map(|_| SliceEntry::default()).collect(),
            }
        }

        pub(in crate::board) fn header(&self) -> &Header {
            &self.header
        }

        pub(in crate::board) fn seats(&self) -> &[SlotEntry] {
            &self.seats
        }

        pub(in crate::board) fn slices(&self) -> &[SliceEntry] {
            &self.slices
        }
    }

    #[derive(Debug)]
    pub(in crate::board) struct Slab(Vec<AtomicU64>);

    impl Slab {
        pub(in crate::board) fn on_heap(elements: usize) -> Self {
            Self((0..elements.div_ceil(2)).map(|_| AtomicU64::new(0)).collect())
        }

        pub(super) fn pairs(&self) -> &[AtomicU64] {
            &self.0
        }

        pub(super) fn pairs_to_write(&self) -> &[AtomicU64] {
            &self.0
        }
    }
}
