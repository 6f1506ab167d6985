//! Which pads there are, and which are gone, whatever happens to this process or to the power.
//!
//! ```text
//! slot 0: generation u64 | for each file: burnt u64, made u64 | BLAKE3 of all before [u8; 32] | zeros to a multiple of 4,096
//! slot 1: the same, of the generation before or after
//! ```
//!
//! Generation `n` is written to slot `n % 2`, and is on the disk before anything depends on it. A slot that does not fit its
//! hash was being written when the power failed, or has decayed since: what it burnt cannot be known, so that as many as one
//! generation may burn are given up.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use crate::error::PoolError;

/// Pads of a file that one generation burns, unless more are wanted at once.
pub(super) const BURN_PADS: u64 = 64;

/// Most pads of a file that one generation burns.
pub(super) const MAX_BURN_PADS: u64 = 256;

/// Slots begin at a multiple of this: a block of most disks.
const ALIGN: usize = 4096;

const HASH_BYTES: usize = 32;

/// Tells this machine from others; a system without it has no name for itself.
const MACHINE: &str = "/etc/machine-id";

/// Of the pads of one file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PadProgress {
    /// Those below are gone, used or not.
    pub(super) burnt: u64,
    /// Those below were written.
    pub(super) made: u64,
}

/// The journal of a pool.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    generation: u64,
    pub(super) marks: Vec<PadProgress>,
}

impl Journal {
    /// A new one, of so many files.
    pub(super) fn create(path: &Path, files: usize) -> Result<Self, PoolError> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|source| PoolError::io(path, source))?;
        let marks = vec![PadProgress::default(); files];
        let mut journal = Self { file, path: path.to_owned(), generation: 0, marks };
        // Both slots are whole from the beginning.
        journal.commit()?;
        journal.commit()?;
        Ok(journal)
    }

    /// Reads one of so many files.
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
            // Both halves are whole again: the next failure loses as much once more, and not twice.
            journal.commit()?;
            journal.commit()?;
        }
        Ok(journal)
    }

    /// Writes the marks as they are now, and returns once they are on the disk.
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

    /// What tells this file from a copy of it, on this machine or another.
    pub(super) fn identity(&self) -> io::Result<u64> {
        let machine = fs::read(MACHINE).unwrap_or_default();
        Ok(identity(self.file.metadata()?.ino(), machine.trim_ascii()))
    }
}

/// The first eight bytes of the BLAKE3 hash of an inode's number and of a machine's name.
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

    /// The same numbers stand in `python/tests/test_pads.py`.
    #[test]
    fn a_file_is_another_one_on_another_machine() {
        let machine = b"0123456789abcdef0123456789abcdef";
        assert_eq!(identity(7, machine), 6_534_307_493_119_828_681);
        assert_ne!(identity(8, machine), identity(7, machine));
        assert_ne!(identity(7, b""), identity(7, machine));
    }
}
