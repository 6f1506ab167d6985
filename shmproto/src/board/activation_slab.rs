//! The x slab for somebody else to write: a device that puts rows there itself (CaraServe §4.2).

use std::sync::Arc;

use super::memory::Slab;

/// The x slab of a board, for whoever writes rows there in the poster's stead; the poster then calls
/// [`Producer::post_in_place`](super::Producer::post_in_place), whose conditions the two keep between them.
///
/// A job's rows may be written once every slice of the job before is done or taken back. Whoever writes too early breaks
/// sums, not memory: to everybody this is words that anybody may change.
#[derive(Debug, Clone)]
pub struct ActivationSlab(Arc<Slab>);

impl ActivationSlab {
    pub(super) fn new(slab: Arc<Slab>) -> Self {
        Self(slab)
    }

    /// Copies numbers in, from number `start` on, which is even.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    pub fn write(&self, start: usize, values: &[f32]) {
        self.0.write(start, values);
    }

    /// Copies numbers out, from number `start` on.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn read(&self, start: usize, values: &mut [f32]) {
        self.0.read(start, values);
    }
}

/// All numbers as words, to be registered with a device. On a board of regions they begin at a page, and are mapped for
/// as long as this or a clone of it lives.
#[cfg(not(loom))]
impl AsRef<[crate::atomic::plain::AtomicU32]> for ActivationSlab {
    fn as_ref(&self) -> &[crate::atomic::plain::AtomicU32] {
        self.0.words_to_write()
    }
}
