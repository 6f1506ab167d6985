//! The x slab for another writer: a device that writes rows there itself (CaraServe §4.2).

use std::sync::Arc;

use super::memory::Slab;

/// The x slab of a board, for a writer that replaces the producer. The producer then calls
/// [`Producer::post_in_place`](super::Producer::post_in_place), whose conditions both must keep.
///
/// A job's rows may be written after every slice of the previous job is done or taken back. An early write
/// corrupts sums but no memory, because every process accesses the slab as atomics.
#[derive(Debug, Clone)]
pub struct ActivationSlab(Arc<Slab>);

impl ActivationSlab {
    pub(super) fn new(slab: Arc<Slab>) -> Self {
        Self(slab)
    }

    /// Copies `values` into the slab from element `start` on, which must be even.
    ///
    /// # Panics
    /// Panics if the values do not fit into the slab.
    pub fn write(&self, start: usize, values: &[f32]) {
        self.0.write(start, values);
    }

    /// Copies elements out of the slab, from element `start` on.
    ///
    /// # Panics
    /// Panics if the slab ends before `values` is full.
    pub fn read(&self, start: usize, values: &mut [f32]) {
        self.0.read(start, values);
    }
}

/// All elements as words, to be registered with a device. On a board of regions the words begin at a page and
/// stay mapped while this slab or a clone of it lives.
#[cfg(not(loom))]
impl AsRef<[crate::atomic::plain::AtomicU32]> for ActivationSlab {
    fn as_ref(&self) -> &[crate::atomic::plain::AtomicU32] {
        self.0.words_to_write()
    }
}
