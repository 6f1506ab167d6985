//! Durable record of the pads that exist and of those that are used, also after a crash or power failure.
//!
//! ```text
//! slot 0: generation u64 | for each file: burnt u64, made u64 | BLAKE3 of all before [u8; 32] |
//!         zeros to a multiple of 4,096
//! slot 1: the same layout, of the generation before or after
//! ```
//!
//! Generation `n` is written to slot `n % 2`, and is on disk before anything depends on it. A slot that fails
//! its hash was being written at a power failure, or has decayed since. The pads that it burnt are then
//! unknown, so the maximum that one generation may burn is given up.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use crate::error::PoolError;

/// Number of pads of a file that one generation burns, unless a call needs more.
pub(super) const BURN_PADS: u64 = 64;

/// Maximum number of pads of a file that one generation burns.
pub(super) const MAX_BURN_PADS: u64 = 256;

/// Slots begin at multiples of this block size of most disks.
const ALIGN: usize = 4096;

const HASH_BYTES: usize = 32;

/// Name of this machine; empty on a system without this file.
const MACHINE: &str = "/etc/machine-id";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PadProgress {
    /// Pads below this number are gone, used or not.
    pub(super) burnt: u64,
    /// Pads below this number were written.
    pub(super) made: u64,
}

#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    generation: u64,
    pub(super) marks: Vec<PadProgress>,
}

impl Journal {
    pub(super) fn create(path: &Path, files: usize) -> Result<Self, PoolError> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|source| PoolError::io(path, source))?;
        let marks = vec![PadProgress::default(); files];
        let mut journal = Self { file, path: path.to_owned(), generation: 0, marks };
        // Both slots are valid from the beginning.
        journal.commit()?;
        journal.commit()?;
        Ok(journal)
    }

    pub(super) fn open(path: &Path, files: usize) -> Result<Self, PoolError> {
        let failed = |source| PoolError::io(path, source);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
        let slots = [0, 1].map(|slot| read(&file, slot, files));
        let newest = slots.iter().flatten().max_by_key(|slot| slot.0);
        let Some((generation, marks)) = newest.cloned() else {
            return Err(PoolError::corrupt(path, "neither of its two halves is whole"));
        };
        let mut journal = Self { file, path: path.to_owned(), generation, marks };
        if slots.iter().any(Option::is_none) {
            journal.marks.iter_mut().for_each(|mark| mark.burnt += MAX_BURN_PADS);
            // Both slots are valid again, so the next failure loses pads only once more.
            journal.commit()?;
            journal.commit()?;
        }
        Ok(journal)
    }

    /// Writes the current counters, and returns once they are on disk.
    pub(super) fn commit(&mut self) -> Result<(), PoolError> {
        self.generation += 1;
        let mut bytes = self.generation.to_le_bytes().to_vec();
        for mark in &self.marks {
            bytes.extend(mark.burnt.to_le_bytes());
            bytes.extend(mark.made.to_le_bytes());
        }
        bytes.extend(blake3::hash(&bytes).as_bytes());
        let at = self.generation % 2 * slot_bytes(self.marks.len()) as u64;
        failpoint::pass("client.pads_before_note");
        let written = self.file.write_all_at(&bytes, at).and_then(|()| self.file.sync_data());
        failpoint::pass("client.pads_noted");
        written.map_err(|source| PoolError::io(&self.path, source))
    }

    /// Returns a number that differs for a copy of this file, on this machine or another.
    pub(super) fn identity(&self) -> io::Result<u64> {
        let machine = fs::read(MACHINE).unwrap_or_default();
        Ok(identity(self.file.metadata()?.ino(), machine.trim_ascii()))
    }
}

/// Returns the first eight bytes of the BLAKE3 hash of an inode number and a machine name.
fn identity(inode: u64, machine: &[u8]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&inode.to_le_bytes()).update(machine);
    let hash: [u8; HASH_BYTES] = hasher.finalize().into();
    hash.first_chunk().map_or(0, |first| u64::from_le_bytes(*first))
}

fn body_bytes(files: usize) -> usize {
    8 + 16 * files + HASH_BYTES
}

fn slot_bytes(files: usize) -> usize {
    body_bytes(files).next_multiple_of(ALIGN)
}

fn read(file: &File, slot: u64, files: usize) -> Option<(u64, Vec<PadProgress>)> {
    let mut bytes = vec![0; body_bytes(files)];
    file.read_exact_at(&mut bytes, slot * slot_bytes(files) as u64).ok()?;
    let (body, hash) = bytes.split_at(bytes.len() - HASH_BYTES);
    if blake3::hash(body).as_bytes() != hash {
        return None;
    }
    let (&generation, marks) = body.as_chunks::<8>().0.split_first()?;
    let marks = marks.as_chunks::<2>().0.iter();
    let marks = marks.map(|&[burnt, made]| PadProgress {
        burnt: u64::from_le_bytes(burnt),
        made: u64::from_le_bytes(made),
    });
    Some((u64::from_le_bytes(generation), marks.collect()))
}

#[cfg(test)]
mod tests {
    use super::identity;

    /// `python/tests/test_pads.py` has the same numbers.
    #[test]
    fn a_file_is_another_one_on_another_machine() {
        let machine = b"0123456789abcdef0123456789abcdef";
        assert_eq!(identity(7, machine), 6_534_307_493_119_828_681);
        assert_ne!(identity(8, machine), identity(7, machine));
        assert_ne!(identity(7, b""), identity(7, machine));
    }
}
