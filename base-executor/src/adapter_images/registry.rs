//! The images offered to workers.
//!
//! An image is offered while this process computes with its bytes, then withdrawn. The memory is freed when
//! the last worker has unmapped it too.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use kernels::lora::SharedBytes;
use model::deltas::matrices::ImageNumber;
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, BorrowedFd, OwnedFd},
};
use shmproto::{image::Image, region::SealedBytes};

/// Offered images by number. Clones share the same table.
#[derive(Debug, Clone)]
pub struct ImageRegistry(Arc<ImageTable>);

#[derive(Debug)]
struct ImageTable {
    images: Mutex<BTreeMap<u64, Image>>,
    next: AtomicU64,
    /// Event descriptor, readable after a change.
    changed: OwnedFd,
}

impl ImageRegistry {
    /// Creates an empty registry.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn new() -> std::io::Result<Self> {
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(ImageTable { images: Mutex::default(), next: AtomicU64::new(1), changed })))
    }

    /// Offers an image until the returned bytes are dropped.
    #[must_use]
    pub fn publish(&self, image: &Image) -> (ImageNumber, SharedBytes) {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        self.0.lock().insert(number, image.clone());
        self.0.notify();
        let bytes = PublishedImage { bytes: image.bytes(), number, library: Arc::downgrade(&self.0) };
        (ImageNumber(number), Arc::new(bytes))
    }

    pub(crate) fn images(&self) -> BTreeMap<u64, Image> {
        self.0.lock().clone()
    }

    /// Returns a descriptor that is readable after a change since [`note_changes`](Self::note_changes).
    pub(crate) fn changed(&self) -> BorrowedFd<'_> {
        self.0.changed.as_fd()
    }

    /// Wakes the thread that waits for changes.
    pub(crate) fn notify(&self) {
        self.0.notify();
    }

    /// Marks all changes so far as seen.
    pub(crate) fn note_changes(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.0.changed, &mut count);
    }
}

impl ImageTable {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Image>> {
        // Each change of the map is one call, so the map is consistent even after a panic of a lock holder.
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self) {
        // A full counter has already woken the reader.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }
}

/// Bytes of an offered image; dropping them withdraws it.
struct PublishedImage {
    bytes: Arc<SealedBytes>,
    number: u64,
    library: Weak<ImageTable>,
}

impl AsRef<[u8]> for PublishedImage {
    fn as_ref(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }
}

impl Drop for PublishedImage {
    fn drop(&mut self) {
        if let Some(library) = self.library.upgrade() {
            library.lock().remove(&self.number);
            library.notify();
        }
    }
}

impl fmt::Debug for PublishedImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublishedImage({})", self.number)
    }
}
