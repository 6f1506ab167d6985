//! Blocks of keys and values in a file, which outlives the process: the tier below memory.
//!
//! The file has as many equal slots as it is told, each for the bytes of a block and a [`BlockRecord`] of what they are. It
//! takes room on the disk as slots are written. Which slot holds what, and which is given up, is for others to decide; they
//! learn from [`OpenedStore::blocks`] what earlier processes left behind.
//!
//! # Layout
//!
//! - `record`: what a block holds.
//! - `format`: the file, byte by byte.
//! - `dir_lock`: its directory and its lock.
//!
//! # Principles
//!
//! - Never other bytes than were written. A write takes the slot's entry away, writes the bytes, then the entry; every entry
//!   has a checksum of itself and one of the bytes. So nothing need be synced: what a crash tore, or left unwritten in
//!   whatever order, is found out when it is read.
//! - What the file says is not believed: it decides about no offset and no allocation.
//! - A broken file costs what it held, not the start of a process.

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

/// Bytes of a block at most.
pub const MAX_BLOCK_BYTES: usize = 1 << 30;
/// Tokens of a block at most.
pub const MAX_BLOCK_TOKENS: usize = 1024;

/// A place for a block, below [`StoreLayout::slots`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreSlot(pub u32);

/// What a store holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLayout {
    /// A hash of all that decides a block's bits: the base model, the kind of device, how the bytes lie.
    pub fingerprint: [u8; 32],
    /// Bytes of a block, from 1 to [`MAX_BLOCK_BYTES`].
    pub block_bytes: usize,
    /// Tokens of a block, from 1 to [`MAX_BLOCK_TOKENS`].
    pub block_tokens: usize,
    /// Places there are.
    pub slots: u32,
}

/// Why a block was not written, read or forgotten.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The disk, a quota or a limit of this process leaves no room. Whether the slot holds what it held is unknown.
    #[error("there is no room to keep KV blocks in {}: {source}; free some, or keep fewer blocks", path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The operating system said no. After a write or [`BlockStore::forget`], whether the slot holds what it held is unknown.
    #[error("cannot {action} {}: {source}; check the disk", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The slot is empty, or it holds another block.
    #[error("slot {} does not hold this block; compute it anew", .0.0)]
    Absent(StoreSlot),
    /// What the slot holds is not what was written.
    #[error("the KV block in slot {} is damaged; compute it anew", .0.0)]
    Damaged(StoreSlot),
}

/// What there was when a store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreContents {
    /// No file, or an empty one.
    Nothing,
    /// A store of this fingerprint and these blocks. All others are begun anew.
    Same,
    /// A store of another fingerprint, or of other blocks.
    Other,
    /// A store of another version of this program.
    OtherVersion {
        /// What it says.
        version: u32,
    },
    /// A store whose beginning is damaged.
    Damaged,
}

/// An open store, and what is in it.
#[derive(Debug)]
pub struct OpenedStore {
    /// The store.
    pub store: BlockStore,
    /// What was there; nothing is left of it but [`StoreContents::Same`].
    pub found: StoreContents,
    /// The blocks it holds, in the order of their slots. Several slots may hold the same block. Its bytes are checked
    /// when they are read.
    pub blocks: Vec<(StoreSlot, BlockRecord)>,
    /// Slots whose entries are damaged, as by a process that was killed as it wrote them. They count as empty.
    pub damaged: usize,
}

/// See the module. Different slots may be written and read at once. What is read from a slot while it is written is the
/// block that was asked for or an error.
#[derive(Debug)]
pub struct BlockStore {
    file: File,
    path: PathBuf,
    format: StoreFormat,
    slots: u32,
}

impl BlockStore {
    /// Opens the store at `path` for this process alone, creates it if it is not there, and begins it anew if it is not of
    /// this `layout`. Of slots beyond those of `layout` the contents are given up. The file and its directory are this
    /// user's alone.
    ///
    /// # Errors
    /// If the directory is not private, the file is no store, another process has it, or the system refuses.
    ///
    /// # Panics
    /// If blocks of this length are not possible.
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

    /// Places there are.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.format.block_bytes
    }

    /// Puts a block into a slot, in place of what it held. The bytes are in the system's hands when this returns: they
    /// survive this process, and for the most part a crash of the machine.
    ///
    /// # Errors
    /// If there is no room or the disk fails; then nothing should be read from the slot until it is written again.
    ///
    /// # Panics
    /// If the slot does not exist, or `bytes` or the record's tokens are not one block's worth.
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

    /// Copies the bytes of `record`'s block to `into`; on errors its contents are undefined.
    ///
    /// # Errors
    /// If the slot holds something else, or not what was written, or the disk fails.
    ///
    /// # Panics
    /// If the slot does not exist, or `into` is not one block's worth.
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

    /// Empties a slot and gives its room back, where the file system can do that. A slot that is to be written need not be
    /// emptied before.
    ///
    /// # Errors
    /// If the disk fails.
    ///
    /// # Panics
    /// If the slot does not exist.
    pub fn forget(&self, slot: StoreSlot) -> Result<(), StoreError> {
        self.check(slot);
        self.take_entry_away(slot).map_err(|source| self.not_written(source))?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Refused, it costs the room until the slot is written again.
        let _ = fallocate(&self.file, hole, self.format.payload_at(slot), self.format.block_bytes as u64);
        Ok(())
    }

    fn check(&self, slot: StoreSlot) {
        assert!(slot.0 < self.slots, "slot {} of {}", slot.0, self.slots);
    }

    fn take_entry_away(&self, slot: StoreSlot) -> io::Result<()> {
        self.file.write_all_at(&NO_SEAL, self.format.entry_at(slot))
    }

    /// Whose the file is, from its beginning.
    fn identify(&self) -> Result<StoreContents, OpenError> {
        let mut header = [0; HEADER_BYTES];
        let filled = self.read_at(&mut header, 0).map_err(failed("read", &self.path))?;
        let (magic, rest) = header.split_at(MAGIC.len());
        // A process or a machine that stopped as it began the file may have left zeroes, or half of it.
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

    /// What the file held until now has no valid seal any more, even where it is still there after a crash: the key is
    /// another one, or the bytes are gone.
    fn begin_anew(&self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(self.format.header(), 0)
    }

    /// Shortens a file of more slots. Entries behind the last slot are in the way of those who come with more slots again.
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

    /// The blocks that entries tell of, and how many entries are damaged.
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

    /// Fills `into` from what the file has at `at`; returns how many bytes there were.
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
