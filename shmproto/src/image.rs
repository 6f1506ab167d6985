//! An adapter as a sealed region: a header, a table of its matrices, and their numbers.
//!
//! The executor builds an image once; it and every worker map the same pages. `docs/PROTOCOL.md` draws the bytes.
//! The bytes cannot change after they were sealed, so they are checked once and the table is kept as values.

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

/// What an image's mapping is called in the system's lists. No adapter's name or owner shows there.
const REGION_NAME: &str = "holobiont-adapter";

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The memory itself.
    #[error("the adapter's memory: {0}")]
    Region(#[from] RegionError),
    /// It is shorter than its header and table.
    #[error("an adapter image of {bytes} bytes is too short for its header and {modules} modules: refuse it")]
    Short {
        /// Bytes there are.
        bytes: usize,
        /// Modules it claims.
        modules: u32,
    },
    /// It begins with something else.
    #[error("what was handed over is no adapter image: refuse it, and close the connection")]
    Magic,
    /// Another version made it.
    #[error(
        "the adapter image has version {0}, this program knows {VERSION}: run executor and workers of one release"
    )]
    Version(u32),
    /// Its count of modules makes no sense.
    #[error("an adapter image has 1 to {MAX_MODULES} modules, not {0}: refuse it")]
    Modules(u32),
    /// It says another size than it has.
    #[error("the adapter image says it has {said} bytes and has {bytes}: refuse it")]
    Size {
        /// Bytes the header says.
        said: u64,
        /// Bytes there are.
        bytes: usize,
    },
    /// Bytes that mean nothing are not zero.
    #[error("a reserved field of the adapter image is not zero: refuse it, or run one release everywhere")]
    Reserved,
    /// An entry of the table.
    #[error(
        "module {module} (entry {entry}) of the adapter image {fault}: refuse it, and load the adapter again"
    )]
    Entry {
        /// Place in the table, from 0.
        entry: usize,
        /// The module it claims.
        module: u32,
        /// What is wrong with it.
        fault: EntryFault,
    },
}

/// What is wrong with an entry of an image's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EntryFault {
    /// Not `layer * 8 + target` of a layer and target there are.
    #[error("is none that a model can have")]
    Module,
    /// Not after the entry before it.
    #[error("does not follow the module before it")]
    Order,
    /// Rank out of range.
    #[error("has rank {0}, not 1 to {MAX_RANK}")]
    Rank(u32),
    /// Columns or rows out of range.
    #[error("has a side of {0}, not 1 to {MAX_SIDE}")]
    Side(u32),
    /// The scale is no number.
    #[error("has a scale that is no finite number")]
    Scale,
    /// A kind of numbers that there is not.
    #[error("has numbers of kind {0}, not 0 to 2")]
    Kind(u8),
    /// A factor begins off a line.
    #[error("has a factor at byte {0}, not at a multiple of {ALIGNMENT_BYTES}")]
    Alignment(u64),
    /// A factor is not inside the data.
    #[error("has a factor of {bytes} bytes at byte {offset}, outside the data")]
    Outside {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        bytes: u64,
    },
}

/// An adapter in sealed memory, checked.
#[derive(Debug, Clone)]
pub struct Image {
    bytes: Arc<SealedBytes>,
    entries: Arc<[ImageEntry]>,
}

impl Image {
    /// Puts `entries`, whose offsets count from the start of `data`, and `data` into sealed memory.
    pub fn build(entries: &[ImageEntry], data: &[u8]) -> Result<Self, ImageError> {
        let head = table::head(entries, data.len())?;
        let bytes = SealedBytes::build(REGION_NAME, &[&head, data])?;
        Self::checked(bytes)
    }

    /// Maps an image that was handed over, if it is sealed, of at most `max_bytes`, and right in every field.
    pub fn map(fd: OwnedFd, max_bytes: usize) -> Result<Self, ImageError> {
        Self::checked(SealedBytes::map(fd, max_bytes)?)
    }

    fn checked(bytes: SealedBytes) -> Result<Self, ImageError> {
        let entries = entries(bytes.as_ref())?.into();
        Ok(Self { bytes: Arc::new(bytes), entries })
    }

    /// Its matrices, by ascending module. Their offsets count from the image's first byte, and lie inside.
    #[must_use]
    pub fn entries(&self) -> &[ImageEntry] {
        &self.entries
    }

    /// The entry of `module`, if the adapter changes it.
    #[must_use]
    pub fn entry(&self, module: u32) -> Option<&ImageEntry> {
        let at = self.entries.binary_search_by_key(&module, |entry| entry.module).ok()?;
        self.entries.get(at)
    }

    /// The whole image.
    #[must_use]
    pub fn bytes(&self) -> Arc<SealedBytes> {
        Arc::clone(&self.bytes)
    }

    /// The descriptor, to be handed over.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bytes.fd()
    }
}
