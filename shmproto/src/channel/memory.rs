//! A channel's memory as atomics: head, rings, slab.

#[cfg(not(loom))]
pub(super) use self::mapped::Shared;
#[cfg(loom)]
pub(super) use self::modelled::Shared;

use super::layout::{Head, Place};
use crate::atomic::AtomicU64;

/// Atomics over a region, or over the heap.
#[cfg(not(loom))]
mod mapped {
    use super::{AtomicU64, Head, Place};
    use crate::channel::Geometry;
    use crate::channel::layout::{RINGS_OFFSET, slab_offset};
    use crate::line::LINE_BYTES;
    use crate::memory::Memory;
    use crate::region::Region;

    /// The region of a channel. Its geometry is this end's own copy.
    #[derive(Debug)]
    pub(in crate::channel) struct Shared {
        memory: Memory,
        geometry: Geometry,
        slab_words: usize,
    }

    impl Shared {
        /// Zeros on the heap.
        pub(in crate::channel) fn on_heap(geometry: Geometry) -> Self {
            let bytes = usize::try_from(geometry.region_bytes()).unwrap_or(usize::MAX);
            Self::over(Memory::on_heap(bytes), geometry)
        }

        /// A region, if it is as large as the geometry says.
        pub(in crate::channel) fn mapped(region: Region, geometry: Geometry) -> Option<Self> {
            (region.bytes() as u64 == geometry.region_bytes())
                .then(|| Self::over(Memory::mapped(region), geometry))
        }

        fn over(memory: Memory, geometry: Geometry) -> Self {
            let slab_words = (memory.bytes() - slab_offset(geometry.depth)) / 8;
            Self { memory, geometry, slab_words }
        }

        pub(in crate::channel) fn geometry(&self) -> Geometry {
            self.geometry
        }

        pub(in crate::channel) fn head(&self) -> &Head {
            // SAFETY: a Head is atomics and padding.
            unsafe { &self.memory.at(0, 1)[0] }
        }

        pub(in crate::channel) fn calls(&self) -> &[Place] {
            // SAFETY: a Place is atomics.
            unsafe { self.memory.at(RINGS_OFFSET, self.geometry.depth as usize) }
        }

        pub(in crate::channel) fn replies(&self) -> &[Place] {
            let depth = self.geometry.depth as usize;
            // SAFETY: a Place is atomics.
            unsafe { self.memory.at(RINGS_OFFSET + depth * LINE_BYTES, depth) }
        }

        pub(in crate::channel) fn slab(&self) -> &[AtomicU64] {
            // SAFETY: these are atomics.
            unsafe { self.memory.at(slab_offset(self.geometry.depth), self.slab_words) }
        }

        pub(in crate::channel) fn region(&self) -> Option<&Region> {
            self.memory.region()
        }
    }
}

/// Loom's atomics are objects with a place in the model: nothing to cast from bytes.
#[cfg(loom)]
mod modelled {
    use super::{AtomicU64, Head, Place};
    use crate::channel::Geometry;

    /// See the other one.
    #[derive(Debug)]
    pub(in crate::channel) struct Shared {
        head: Head,
        calls: Vec<Place>,
        replies: Vec<Place>,
        slab: Vec<AtomicU64>,
        geometry: Geometry,
    }

    impl Shared {
        pub(in crate::channel) fn on_heap(geometry: Geometry) -> Self {
            let ring = || (0..geometry.depth).map(|_| Place::default()).collect();
            let slab = (0..geometry.slab_bytes / 8).map(|_| AtomicU64::new(0)).collect();
            Self { head: Head::default(), calls: ring(), replies: ring(), slab, geometry }
        }

        pub(in crate::channel) fn geometry(&self) -> Geometry {
            self.geometry
        }

        pub(in crate::channel) fn head(&self) -> &Head {
            &self.head
        }

        pub(in crate::channel) fn calls(&self) -> &[Place] {
            &self.calls
        }

        pub(in crate::channel) fn replies(&self) -> &[Place] {
            &self.replies
        }

        pub(in crate::channel) fn slab(&self) -> &[AtomicU64] {
            &self.slab
        }
    }
}
