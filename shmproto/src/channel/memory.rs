//! A channel's memory as atomics: head, rings, slab.

#[cfg(not(loom))]
pub(super) use self::mapped::ChannelMemory;
#[cfg(loom)]
pub(super) use self::modelled::ChannelMemory;

use super::layout::{ChannelHead, RingSlot};
use crate::atomic::AtomicU64;

/// Atomics over a region, or over the heap.
#[cfg(not(loom))]
mod mapped {
    use super::{AtomicU64, ChannelHead, RingSlot};
    use crate::cache_line::LINE_BYTES;
    use crate::channel::Geometry;
    use crate::channel::layout::{RINGS_OFFSET, slab_offset};
    use crate::memory::AtomicMemory;
    use crate::region::Region;

    /// The region of a channel. Its geometry is this end's own copy.
    #[derive(Debug)]
    pub(in crate::channel) struct ChannelMemory {
        memory: AtomicMemory,
        geometry: Geometry,
        slab_words: usize,
    }

    impl ChannelMemory {
        /// Zeros on the heap.
        pub(in crate::channel) fn on_heap(geometry: Geometry) -> Self {
            let bytes = usize::try_from(geometry.region_bytes()).unwrap_or(usize::MAX);
            Self::over(AtomicMemory::on_heap(bytes), geometry)
        }

        /// A region, if it is as large as the geometry says.
        pub(in crate::channel) fn mapped(region: Region, geometry: Geometry) -> Option<Self> {
            (region.bytes() as u64 == geometry.region_bytes())
                .then(|| Self::over(AtomicMemory::mapped(region), geometry))
        }

        fn over(memory: AtomicMemory, geometry: Geometry) -> Self {
            let slab_words = (memory.bytes() - slab_offset(geometry.depth)) / 8;
            Self { memory, geometry, slab_words }
        }

        pub(in crate::channel) fn geometry(&self) -> Geometry {
            self.geometry
        }

        pub(in crate::channel) fn head(&self) -> &ChannelHead {
            // SAFETY: a Head is atomics and padding.
            unsafe { &self.memory.at(0, 1)[0] }
        }

        pub(in crate::channel) fn calls(&self) -> &[RingSlot] {
            // SAFETY: a Place is atomics.
            unsafe { self.memory.at(RINGS_OFFSET, self.geometry.depth as usize) }
        }

        pub(in crate::channel) fn replies(&self) -> &[RingSlot] {
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
    use super::{AtomicU64, ChannelHead, RingSlot};
    use crate::channel::Geometry;

    /// See the other one.
    #[derive(Debug)]
    pub(in crate::channel) struct ChannelMemory {
        head: ChannelHead,
        calls: Vec<RingSlot>,
        replies: Vec<RingSlot>,
        slab: Vec<AtomicU64>,
        geometry: Geometry,
    }

    impl ChannelMemory {
        pub(in crate::channel) fn on_heap(geometry: Geometry) -> Self {
            let ring = || (0..geometry.depth).map(|_| RingSlot::default()).collect();
            let slab = (0..geometry.slab_bytes / 8).map(|_| AtomicU64::new(0)).collect();
            Self { head: ChannelHead::default(), calls: ring(), replies: ring(), slab, geometry }
        }

        pub(in crate::channel) fn geometry(&self) -> Geometry {
            self.geometry
        }

        pub(in crate::channel) fn head(&self) -> &ChannelHead {
            &self.head
        }

        pub(in crate::channel) fn calls(&self) -> &[RingSlot] {
            &self.calls
        }

        pub(in crate::channel) fn replies(&self) -> &[RingSlot] {
            &self.replies
        }

        pub(in crate::channel) fn slab(&self) -> &[AtomicU64] {
            &self.slab
        }
    }
}
