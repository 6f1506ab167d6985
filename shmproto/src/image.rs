//! Adapter as a sealed region: a header, a table of its matrices, and their values.
//!
//! The executor builds an image once; executor and workers map the same pages. `docs/PROTOCOL.md` draws the
//! bytes. Sealed bytes cannot change, so they are checked once and the table is kept as values.

mod table;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

pub use self::table::{
    ALIGNMENT_BYTES, ENTRY_BYTES, HEADER_BYTES, ImageEntry, LAYOUT, MAGIC, MAX_MODULES, MAX_RANK, MAX_SIDE,
    VERSION, entries,
};
use crate::region::{RegionError, SealedBytes};

/// Name of an image's mapping in the system's lists, which shows no adapter or owner.
const REGION_NAME: &str = "holobiont-adapter";

/// Error of building or mapping an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The memory could not be created or mapped.
    #[error("the adapter's memory: {0}")]
    Region(#[from] RegionError),
    /// The image is shorter than its header and table.
    #[error("an adapter image of {bytes} bytes is too short for its header and {modules} modules: refuse it")]
    Short {
        /// Size of the image in bytes.
        bytes: usize,
        /// Number of modules that the header states.
        modules: u32,
    },
    /// The image does not begin with [`MAGIC`].
    #[error("what was handed over is no adapter image: refuse it, and close the connection")]
    Magic,
    /// The image has another version.
    #[error(
        "the adapter image has version {0}, this program knows {VERSION}: run executor and workers of one release"
    )]
    Version(u32),
    /// The number of modules is out of range.
    #[error("an adapter image has 1 to {MAX_MODULES} modules, not {0}: refuse it")]
    Modules(u32),
    /// The size in the header is not the size of the region.
    #[error("the adapter image says it has {said} bytes and has {bytes}: refuse it")]
    Size {
        /// Size in bytes that the header states.
        said: u64,
        /// Size of the region in bytes.
        bytes: usize,
    },
    /// A reserved byte is not zero.
    #[error("a reserved field of the adapter image is not zero: refuse it, or run one release everywhere")]
    Reserved,
    /// An entry of the table is invalid.
    #[error(
        "module {module} (entry {entry}) of the adapter image {fault}: refuse it, and load the adapter again"
    )]
    Entry {
        /// Index of the entry in the table, from 0.
        entry: usize,
        /// Module number in the invalid entry.
        module: u32,
        /// Reason why the entry is invalid.
        fault: EntryFault,
    },
}

/// Fault of an entry in an image's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EntryFault {
    /// The module is not `layer * 8 + target` of a possible layer and target.
    #[error("is none that a model can have")]
    Module,
    /// The module does not follow the previous entry's module.
    #[error("does not follow the module before it")]
    Order,
    /// The rank is out of range.
    #[error("has rank {0}, not 1 to {MAX_RANK}")]
    Rank(u32),
    /// The number of columns or rows is out of range.
    #[error("has a side of {0}, not 1 to {MAX_SIDE}")]
    Side(u32),
    /// The scale is not finite.
    #[error("has a scale that is no finite number")]
    Scale,
    /// The element type of a factor is unknown.
    #[error("has numbers of kind {0}, not 0 to 2")]
    Kind(u8),
    /// A factor does not begin at a cache line.
    #[error("has a factor at byte {0}, not at a multiple of {ALIGNMENT_BYTES}")]
    Alignment(u64),
    /// A factor does not lie within the data.
    #[error("has a factor of {bytes} bytes at byte {offset}, outside the data")]
    Outside {
        /// Offset of the factor, in bytes.
        offset: u64,
        /// Size of the factor, in bytes.
        bytes: u64,
    },
}

/// Adapter in sealed memory, whose every field was checked.
#[derive(Debug, Clone)]
pub struct Image {
    bytes: Arc<SealedBytes>,
    entries: Arc<[ImageEntry]>,
}

impl Image {
    /// Writes `entries`, whose offsets count from the start of `data`, and `data` into sealed memory.
    pub fn build(entries: &[ImageEntry], data: &[u8]) -> Result<Self, ImageError> {
        let head = table::head(entries, data.len())?;
        let bytes = SealedBytes::build(REGION_NAME, &[&head, data])?;
        Self::checked(bytes)
    }

    /// Maps a received image if it is sealed, has at most `max_bytes`, and every field is valid.
    pub fn map(fd: OwnedFd, max_bytes: usize) -> Result<Self, ImageError> {
        Self::checked(SealedBytes::map(fd, max_bytes)?)
    }

    fn checked(bytes: SealedBytes) -> Result<Self, ImageError> {
        let entries = entries(bytes.as_ref())?.into();
        Ok(Self { bytes: Arc::new(bytes), entries })
    }

    /// Returns the entries by ascending module; offsets count from the image's first byte and lie within it.
    #[must_use]
    pub fn entries(&self) -> &[ImageEntry] {
        &self.entries
    }

    /// Returns the entry of `module`, if the adapter changes that module.
    #[must_use]
    pub fn entry(&self, module: u32) -> Option<&ImageEntry> {
        let at = self.entries.binary_search_by_key(&module, |entry| entry.module).ok()?;
        self.entries.get(at)
    }

    /// Returns the bytes of the image.
    #[must_use]
    pub fn bytes(&self) -> Arc<SealedBytes> {
        Arc::clone(&self.bytes)
    }

    /// Returns the descriptor, to be sent to a worker.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bytes.fd()
    }
}
