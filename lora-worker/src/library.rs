//! The mapped adapters of this worker, and their handoff to the compute thread without waiting.
//!
//! The control thread updates a [`MappedAdapters`] and puts a copy, a list of counted pointers, on the
//! [`Handoff`]. The compute thread takes the newest copy between two slices and returns its former one. The
//! control thread thus unmaps memory itself, since unmapping is a system call.

use std::{
    mem,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use kernels::lora::{ElementKind, FactorLayout, LayoutError, LoraMatrix, MatrixLayout, SharedBytes};
use shmproto::image::{Image, ImageEntry};

/// Maximum number of mapped adapters: more than a host holds, fewer than the maps that a process may have.
const MAX_ADAPTERS: usize = 2048;

/// The reason why a well-formed image cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdapterError {
    #[error("image {0} is mapped already; use each image number once")]
    Known(u64),
    #[error("{MAX_ADAPTERS} adapters are mapped, which is the maximum; withdraw some first")]
    Full,
    /// The element type is unknown to this version.
    #[error(
        "module {module} stores numbers of the unknown kind {kind}; use a worker of the executor's version"
    )]
    Kind { module: u32, kind: u8 },
    #[error("module {module} cannot be computed with")]
    Layout { module: u32, source: LayoutError },
}

/// The matrices of an adapter, over the shared memory of its image.
#[derive(Debug)]
pub(crate) struct MappedAdapter {
    /// Sorted in ascending order of modules.
    matrices: Vec<(u32, LoraMatrix)>,
}

impl MappedAdapter {
    /// Creates an adapter over an image.
    ///
    /// # Errors
    /// If a matrix is unusable; the error names its module.
    pub(crate) fn over(image: &Image) -> Result<Self, AdapterError> {
        let bytes: SharedBytes = image.bytes();
        let matrices = image.entries().iter().map(|entry| Ok((entry.module, matrix(&bytes, entry)?)));
        let mut matrices = matrices.collect::<Result<Vec<_>, AdapterError>>()?;
        matrices.sort_unstable_by_key(|&(module, _)| module);
        Ok(Self { matrices })
    }

    fn matrix(&self, module: u32) -> Option<&LoraMatrix> {
        let found = self.matrices.binary_search_by_key(&module, |&(module, _)| module).ok()?;
        Some(&self.matrices[found].1)
    }
}

fn matrix(bytes: &SharedBytes, entry: &ImageEntry) -> Result<LoraMatrix, AdapterError> {
    let &ImageEntry { module, rank, columns, rows, scale, a_kind, b_kind, a_offset, b_offset } = entry;
    let factor = |kind, offset| {
        let kind = ElementKind::from_code(kind).ok_or(AdapterError::Kind { module, kind })?;
        Ok(FactorLayout { kind, offset: size(offset) })
    };
    let layout = MatrixLayout {
        rank: size(rank),
        columns: size(columns),
        rows: size(rows),
        scale,
        a: factor(a_kind, a_offset)?,
        b: factor(b_kind, b_offset)?,
    };
    LoraMatrix::over(bytes, layout).map_err(|source| AdapterError::Layout { module, source })
}

/// Converts to `usize`. A number that does not fit becomes larger than any image, which is refused later.
fn size(number: impl TryInto<usize>) -> usize {
    number.try_into().unwrap_or(usize::MAX)
}

/// The adapters of one executor, by the image number that it assigned.
#[derive(Debug, Clone, Default)]
pub(crate) struct MappedAdapters {
    /// Sorted in ascending order of image numbers.
    adapters: Vec<(u64, Arc<MappedAdapter>)>,
}

impl MappedAdapters {
    /// Adds an adapter.
    ///
    /// # Errors
    /// If the number is in use, or [`MAX_ADAPTERS`] are mapped.
    pub(crate) fn add(&mut self, image: u64, adapter: MappedAdapter) -> Result<(), AdapterError> {
        match self.find(image) {
            Ok(_) => Err(AdapterError::Known(image)),
            Err(_) if self.adapters.len() >= MAX_ADAPTERS => Err(AdapterError::Full),
            Err(place) => {
                self.adapters.insert(place, (image, Arc::new(adapter)));
                Ok(())
            }
        }
    }

    pub(crate) fn remove(&mut self, image: u64) {
        if let Ok(place) = self.find(image) {
            self.adapters.remove(place);
        }
    }

    pub(crate) fn matrix(&self, image: u64, module: u32) -> Option<&LoraMatrix> {
        self.adapters[self.find(image).ok()?].1.matrix(module)
    }

    pub(crate) fn adapters(&self) -> u64 {
        self.adapters.len() as u64
    }

    fn find(&self, image: u64) -> Result<usize, usize> {
        self.adapters.binary_search_by_key(&image, |&(number, _)| number)
    }
}

/// Exchange of libraries between the control thread and the compute thread.
#[derive(Debug, Default)]
pub(crate) struct Handoff {
    /// Whether a newer library is present; spares the compute thread the lock.
    fresh: AtomicBool,
    exchange: Mutex<LibrarySwap>,
}

#[derive(Debug, Default)]
struct LibrarySwap {
    newest: Option<MappedAdapters>,
    used: Option<MappedAdapters>,
}

impl Handoff {
    /// Publishes `library` and drops unused ones.
    pub(crate) fn put(&self, library: MappedAdapters) {
        let exchange = LibrarySwap { newest: Some(library), used: None };
        let mut shared = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let old = mem::replace(&mut *shared, exchange);
        self.fresh.store(true, Ordering::Release);
        drop(shared);
        // Dropped after the unlock, so that the compute thread does not wait for unmapping.
        drop(old);
    }

    /// Drops the library that the compute thread has returned.
    pub(crate) fn clear(&self) {
        let used = self.exchange.lock().unwrap_or_else(PoisonError::into_inner).used.take();
        drop(used);
    }

    /// Replaces `library` by the newest one, unless there is none or the lock is held.
    pub(crate) fn receive_newest(&self, library: &mut MappedAdapters) {
        if !self.fresh.load(Ordering::Acquire) {
            return;
        }
        let Ok(mut shared) = self.exchange.try_lock() else { return };
        if let Some(newest) = shared.newest.take() {
            // `put` has already removed any older used library.
            shared.used = Some(mem::replace(library, newest));
        }
        self.fresh.store(false, Ordering::Relaxed);
    }
}
