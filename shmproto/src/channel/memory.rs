//! Memory of a channel as atomics: head, rings, slab.

#[cfg(not(loom))]
pub(super) use self::mapped::ChannelMemory;
#[cfg(loom)]
pub(super) use self::modelled::ChannelMemory;

use super::layout::{ChannelHead, RingSlot};
use crate::atomic::AtomicU64;

#[cfg(not(loom))]
mod mapped {
    use super::{AtomicU64, ChannelHead, RingSlot};
    use crate::cache_line::LINE_BYTES;
    use crate::channel::Geometry;
    use crate::channel::layout::{RINGS_OFFSET, slab_offset};
    use crate::memory::AtomicMemory;
    use crate::region::Region;

    /// Region of a channel, with this end's own copy of the geometry.
    #[derive(Debug)]
    pub(in crate::channel) struct ChannelMemory {
        memory: AtomicMemory,
        geometry: Geometry,
        slab_words: usize,
    }

    impl ChannelMemory {
        pub(in crate::channel) fn on_heap(geometry: Geometry) -> Self {
            let bytes = usize::try_from(geometry.region_bytes()).unwrap_or(usize::MAX);
            Self::over(AtomicMemory::on_heap(bytes), geometry)
        }

        /// Uses a region if its size is that of the geometry.
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
            // SAFETY: a ChannelHead consists of atomics and padding.
            unsafe { &self.memory.at(0, 1)[0] }
        }

        pub(in crate::channel) fn calls(&self) -> &[RingSlot] {
            // SAFETY: a RingSlot consists of atomics.
            unsafe { self.memory.at(RINGS_OFFSET, self.geometry.depth as usize) }
        }

        pub(in crate::channel) fn replies(&self) -> &[RingSlot] {
            let depth = self.geometry.depth as usize;
            // SAFETY: a RingSlot consists of atomics.
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

/// Variant for loom, whose atomics are objects of its model and cannot be cast from bytes.
#[cfg(loom)]
mod modelled {
    use super::{AtomicU64, ChannelHead, RingSlot};
    use crate::channel::Geometry;

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
