//! KV blocks in a file, which survives the process: the disk tier.
//!
//! The file has a fixed number of equal slots, each for the bytes of a block and a [`BlockRecord`] that
//! describes them. The file takes disk space as slots are written. The store's user decides which slot holds
//! which block, and which block is given up; [`OpenedStore::blocks`] lists the blocks that earlier processes
//! left.
//!
//! # Layout
//!
//! - `record`: describes the content of a block.
//! - `format`: the file, byte by byte.
//! - `dir_lock`: its directory and its lock.
//!
//! # Principles
//!
//! - A read never returns other bytes than were written. A write clears the slot's entry, writes the bytes,
//!   then the entry; each entry has a checksum of itself and one of the bytes. So no sync is needed: a read
//!   detects what a crash tore or left unwritten, in any order.
//! - The file is not trusted: its contents decide no offset and no allocation.
//! - A broken file loses its contents but never prevents a process from starting.

mod dir_lock;
mod format;
mod record;
#[cfg(test)]
mod tests;

pub use self::{dir_lock::OpenError, record::BlockRecord};

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate};
use thiserror::Error;

use self::{
    dir_lock::failed,
    format::{HEADER_BYTES, MAGIC, NO_SEAL, SEGMENT_SLOTS, StoreEntry, StoreFormat, VERSION},
};

/// Maximum size of a block in bytes.
pub const MAX_BLOCK_BYTES: usize = 1 << 30;
/// Maximum number of tokens in a block.
pub const MAX_BLOCK_TOKENS: usize = 1024;

/// Index of a slot, below [`StoreLayout::slots`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreSlot(pub u32);

/// Sizes of a store, and the identity of its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLayout {
    /// Hash of all that determines a block's bits: base model, kind of device, layout of the bytes.
    pub fingerprint: [u8; 32],
    /// Size of a block in bytes, from 1 to [`MAX_BLOCK_BYTES`].
    pub block_bytes: usize,
    /// Number of tokens in a block, from 1 to [`MAX_BLOCK_TOKENS`].
    pub block_tokens: usize,
    /// Number of slots in the file.
    pub slots: u32,
}

/// Error of writing, reading or forgetting a block.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The disk, a quota or a limit of this process leaves no space. The content of the slot is unknown.
    #[error("no disk space for KV blocks in {}: {source}; free space, or lower --disk-bytes", path.display())]
    Full {
        /// Path of the store's file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The system refused. After a write or [`BlockStore::forget`], the content of the slot is unknown.
    #[error("cannot {action} {}: {source}; check the disk", path.display())]
    Io {
        /// Operation that was attempted.
        action: &'static str,
        /// Path of the store's file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The slot is empty, or it holds another block.
    #[error("slot {} does not hold this block; compute it again", .0.0)]
    Absent(StoreSlot),
    /// The content of the slot is not what was written.
    #[error("the KV block in slot {} is damaged; compute it again", .0.0)]
    Damaged(StoreSlot),
}

/// Content of the file before a store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreContents {
    /// No file existed, or an empty one.
    Nothing,
    /// A store of this fingerprint and block size. All other contents are replaced.
    Same,
    /// A store of another fingerprint, or of another block size.
    Other,
    /// A store of another version of this program.
    OtherVersion {
        /// Version number in the header.
        version: u32,
    },
    /// A store whose header is damaged.
    Damaged,
}

/// Open store with its contents.
#[derive(Debug)]
pub struct OpenedStore {
    /// The store, ready for reads and writes.
    pub store: BlockStore,
    /// Earlier content of the file, which is kept only for [`StoreContents::Same`].
    pub found: StoreContents,
    /// Blocks in the order of their slots, possibly in several slots each. Reads check their bytes.
    pub blocks: Vec<(StoreSlot, BlockRecord)>,
    /// Number of slots with damaged entries, for example by a killed process. Damaged slots count as empty.
    pub damaged: usize,
}

/// Store of KV blocks in a file. Different slots may be written and read concurrently. A read during a write
/// of its slot returns the requested block or an error.
#[derive(Debug)]
pub struct BlockStore {
    file: File,
    path: PathBuf,
    format: StoreFormat,
    slots: u32,
}

impl BlockStore {
    /// Opens the store at `path` for this process alone; creates a missing store, and replaces one with
    /// another `layout`. Slots beyond those of `layout` are dropped. File and directory are private to this
    /// user.
    ///
    /// # Errors
    /// Returns an error if the directory is not private, the file is no store or in use, or the disk fails.
    ///
    /// # Panics
    /// Panics if the sizes of a block are out of range.
    pub fn open(path: &Path, layout: &StoreLayout) -> Result<OpenedStore, OpenError> {
        assert!((1..=MAX_BLOCK_BYTES).contains(&layout.block_bytes), "{} bytes a block", layout.block_bytes);
        assert!(
            (1..=MAX_BLOCK_TOKENS).contains(&layout.block_tokens),
            "{} tokens a block",
            layout.block_tokens
        );
        let file = dir_lock::claim(path)?;
        let store =
            Self { file, path: path.to_owned(), format: StoreFormat::new(layout), slots: layout.slots };
        let found = store.identify()?;
        match found {
            StoreContents::Same => store.give_up_excess().map_err(failed("shorten", path))?,
            _ => store.begin_anew().map_err(failed("begin", path))?,
        }
        let (blocks, damaged) = store.scan().map_err(failed("read", path))?;
        Ok(OpenedStore { store, found, blocks, damaged })
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the size of a block in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.format.block_bytes
    }

    /// Writes a block into a slot, in place of its content. On return the system has the bytes: they survive
    /// this process, and mostly a crash of the machine.
    ///
    /// # Errors
    /// Returns an error if there is no space or the disk fails; the slot must then be written before a read.
    ///
    /// # Panics
    /// Panics if the slot does not exist, or `bytes` or the record's tokens are not one block's worth.
    pub fn write(&self, slot: StoreSlot, record: &BlockRecord, bytes: &[u8]) -> Result<(), StoreError> {
        self.check(slot);
        assert_eq!(bytes.len(), self.format.block_bytes, "bytes of one block");
        assert_eq!(record.tokens.len(), self.format.block_tokens, "tokens of one block");
        let payload = blake3::hash(bytes);
        let written = self
            .take_entry_away(slot)
            .and_then(|()| self.file.write_all_at(bytes, self.format.payload_at(slot)))
            .and_then(|()| {
                let entry = self.format.seal(slot, record, &payload);
                self.file.write_all_at(&entry, self.format.entry_at(slot))
            });
        written.map_err(|source| self.not_written(source))
    }

    /// Reads the bytes of `record`'s block into `into`, whose contents are undefined after an error.
    ///
    /// # Errors
    /// Returns an error if the slot holds another block or damaged bytes, or the disk fails.
    ///
    /// # Panics
    /// Panics if the slot does not exist, or `into` is not one block's worth.
    pub fn read(&self, slot: StoreSlot, record: &BlockRecord, into: &mut [u8]) -> Result<(), StoreError> {
        self.check(slot);
        assert_eq!(into.len(), self.format.block_bytes, "bytes of one block");
        let mut entry = vec![0; self.format.entry_bytes()];
        self.read_at(&mut entry, self.format.entry_at(slot)).map_err(|source| self.not_read(source))?;
        let payload = match self.format.unseal(slot, &entry) {
            StoreEntry::Block(found, payload) if found.is_of_same_block(record) => payload,
            StoreEntry::Damaged => return Err(StoreError::Damaged(slot)),
            StoreEntry::Block(..) | StoreEntry::Empty => return Err(StoreError::Absent(slot)),
        };
        let filled = self.read_at(into, self.format.payload_at(slot));
        match filled.map_err(|source| self.not_read(source))? {
            filled if filled == into.len() && blake3::hash(into) == payload => Ok(()),
            _ => Err(StoreError::Damaged(slot)),
        }
    }

    /// Empties a slot and frees its disk space, if the file system can. A write needs no emptied slot.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    ///
    /// # Panics
    /// Panics if the slot does not exist.
    pub fn forget(&self, slot: StoreSlot) -> Result<(), StoreError> {
        self.check(slot);
        self.take_entry_away(slot).map_err(|source| self.not_written(source))?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // If the system refuses, the space stays in use until the slot is written again.
        let _ = fallocate(&self.file, hole, self.format.payload_at(slot), self.format.block_bytes as u64);
        Ok(())
    }

    fn check(&self, slot: StoreSlot) {
        assert!(slot.0 < self.slots, "slot {} of {}", slot.0, self.slots);
    }

    fn take_entry_away(&self, slot: StoreSlot) -> io::Result<()> {
        self.file.write_all_at(&NO_SEAL, self.format.entry_at(slot))
    }

    /// Determines the content of the file from its header.
    fn identify(&self) -> Result<StoreContents, OpenError> {
        let mut header = [0; HEADER_BYTES];
        let filled = self.read_at(&mut header, 0).map_err(failed("read", &self.path))?;
        let (magic, rest) = header.split_at(MAGIC.len());
        // A process or machine that stopped while it began the file may have left zeros, or a partial header.
        if header[..filled].iter().all(|&byte| byte == 0) {
            return Ok(StoreContents::Nothing);
        }
        if magic != MAGIC && !MAGIC.starts_with(&header[..filled]) {
            return Err(OpenError::NotAStore(self.path.clone()));
        }
        let version = rest.first_chunk().map_or(0, |version| u32::from_le_bytes(*version));
        Ok(match () {
            () if header == *self.format.header() => StoreContents::Same,
            () if filled < HEADER_BYTES => StoreContents::Damaged,
            () if version != VERSION => StoreContents::OtherVersion { version },
            () if StoreFormat::is_header(&header) => StoreContents::Other,
            () => StoreContents::Damaged,
        })
    }

    /// Truncates the file and writes a new header. Old contents lose their seals, even after a crash, because
    /// the key differs.
    fn begin_anew(&self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(self.format.header(), 0)
    }

    /// Shortens a file with more slots, and clears later entries so that they never reappear.
    fn give_up_excess(&self) -> io::Result<()> {
        let end = self.format.end(self.slots);
        if self.file.metadata()?.len() <= end {
            return Ok(());
        }
        if !self.slots.is_multiple_of(SEGMENT_SLOTS) {
            let excess = SEGMENT_SLOTS - self.slots % SEGMENT_SLOTS;
            let entries = vec![0; excess as usize * self.format.entry_bytes()];
            self.file.write_all_at(&entries, self.format.entry_at(StoreSlot(self.slots)))?;
        }
        self.file.set_len(end)
    }

    /// Returns the blocks of all valid entries, and the number of damaged entries.
    fn scan(&self) -> io::Result<(Vec<(StoreSlot, BlockRecord)>, usize)> {
        let (mut blocks, mut damaged) = (Vec::new(), 0);
        let entry_bytes = self.format.entry_bytes();
        let mut table = vec![0; SEGMENT_SLOTS as usize * entry_bytes];
        for first in (0..self.slots).step_by(SEGMENT_SLOTS as usize) {
            let entries = SEGMENT_SLOTS.min(self.slots - first) as usize;
            let filled =
                self.read_at(&mut table[..entries * entry_bytes], self.format.entry_at(StoreSlot(first)))?;
            if filled == 0 {
                break;
            }
            for (slot, entry) in (first..).map(StoreSlot).zip(table[..filled].chunks_exact(entry_bytes)) {
                match self.format.unseal(slot, entry) {
                    StoreEntry::Empty => {}
                    StoreEntry::Damaged => damaged += 1,
                    StoreEntry::Block(record, _) => blocks.push((slot, record)),
                }
            }
        }
        Ok((blocks, damaged))
    }

    /// Fills `into` from offset `at` of the file; returns the number of bytes that existed.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < into.len() {
            match self.file.read_at(&mut into[filled..], at + filled as u64) {
                Ok(0) => break,
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn not_read(&self, source: io::Error) -> StoreError {
        StoreError::Io { action: "read a KV block in", path: self.path.clone(), source }
    }

    fn not_written(&self, source: io::Error) -> StoreError {
        let path = self.path.clone();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                StoreError::Full { path, source }
            }
            _ => StoreError::Io { action: "write a KV block to", path, source },
        }
    }
}
