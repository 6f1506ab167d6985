//! The adapters this worker has mapped, and how the thread that computes comes to know them without ever waiting.
//!
//! The thread that talks to the executor keeps a [`MappedAdapters`] up to date and puts a copy of it, a list of counted
//! pointers, on the [`Handoff`]. The thread that computes takes the newest from there between two slices and leaves the
//! one it had, so that maps are undone by the thread that made them: to undo one is a system call.

use std::{
    mem,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use kernels::lora::{ElementKind, FactorLayout, LayoutError, LoraMatrix, MatrixLayout, SharedBytes};
use shmproto::image::{Image, ImageEntry};

/// Adapters a worker maps at most: more than a host holds, fewer than a process may have maps.
const MAX_ADAPTERS: usize = 2048;

/// Why an image cannot be used though it is well formed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdapterError {
    /// Its number is taken.
    #[error("image {0} is mapped already; offer each number once")]
    Known(u64),
    /// There is no room.
    #[error("{MAX_ADAPTERS} adapters are mapped, and no worker maps more; withdraw some first")]
    Full,
    /// Numbers are stored in a way that this version does not know.
    #[error(
        "module {module} stores numbers as kind {kind}, which is none of 0 (f32), 1 (f16), 2 (bf16); use the worker of the executor's version"
    )]
    Kind {
        /// The module.
        module: u32,
        /// What it says.
        kind: u8,
    },
    /// A matrix that cannot be computed with.
    #[error("module {module} cannot be computed with")]
    Layout {
        /// The module.
        module: u32,
        /// What is wrong with its matrices.
        source: LayoutError,
    },
}

/// An adapter: its matrices, over the memory they were handed over in.
#[derive(Debug)]
pub(crate) struct MappedAdapter {
    /// Ascending by module.
    matrices: Vec<(u32, LoraMatrix)>,
}

impl MappedAdapter {
    /// An adapter over an image.
    ///
    /// # Errors
    /// If a matrix cannot be computed with; it is named.
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

/// What does not fit is larger than any image, and is refused as such.
fn size(number: impl TryInto<usize>) -> usize {
    number.try_into().unwrap_or(usize::MAX)
}

/// The adapters of one executor, by the number it gave to each.
#[derive(Debug, Clone, Default)]
pub(crate) struct MappedAdapters {
    /// Ascending by number.
    adapters: Vec<(u64, Arc<MappedAdapter>)>,
}

impl MappedAdapters {
    /// Adds an adapter.
    ///
    /// # Errors
    /// If the number is taken, or there are too many.
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

    /// Takes an adapter away, if it is there.
    pub(crate) fn remove(&mut self, image: u64) {
        if let Ok(place) = self.find(image) {
            self.adapters.remove(place);
        }
    }

    /// The matrix of a module of an adapter.
    pub(crate) fn matrix(&self, image: u64, module: u32) -> Option<&LoraMatrix> {
        self.adapters[self.find(image).ok()?].1.matrix(module)
    }

    /// How many adapters there are.
    pub(crate) fn adapters(&self) -> u64 {
        self.adapters.len() as u64
    }

    fn find(&self, image: u64) -> Result<usize, usize> {
        self.adapters.binary_search_by_key(&image, |&(number, _)| number)
    }
}

/// Where a library is left for the thread that computes.
#[derive(Debug, Default)]
pub(crate) struct Handoff {
    /// Whether there is something to take. Spares the thread that computes the lock.
    fresh: AtomicBool,
    exchange: Mutex<LibrarySwap>,
}

#[derive(Debug, Default)]
struct LibrarySwap {
    newest: Option<MappedAdapters>,
    used: Option<MappedAdapters>,
}

impl Handoff {
    /// Leaves `library` to be taken, and clears away what is not used any more.
    pub(crate) fn put(&self, library: MappedAdapters) {
        let exchange = LibrarySwap { newest: Some(library), used: None };
        let mut shared = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let old = mem::replace(&mut *shared, exchange);
        self.fresh.store(true, Ordering::Release);
        drop(shared);
        // Only now, so that nobody waits while maps are undone.
        drop(old);
    }

    /// Clears away what is not used any more.
    pub(crate) fn clear(&self) {
        let used = self.exchange.lock().unwrap_or_else(PoisonError::into_inner).used.take();
        drop(used);
    }

    /// Makes `library` the newest, if there is a newer one and nobody uses the handoff at this moment.
    pub(crate) fn receive_newest(&self, library: &mut MappedAdapters) {
        if !self.fresh.load(Ordering::Acquire) {
            return;
        }
        let Ok(mut shared) = self.exchange.try_lock() else { return };
        if let Some(newest) = shared.newest.take() {
            // There is no older one: `put` has cleared it away.
            shared.used = Some(mem::replace(library, newest));
        }
        self.fresh.store(false, Ordering::Relaxed);
    }
}
