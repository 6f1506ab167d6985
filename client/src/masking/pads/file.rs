//! The pads of a site in one direction, one behind the other.
//!
//! ```text
//! pad: key [u8; 32] | effect u64 x width of an answer | first half of BLAKE3(pool, file, number, all before) [u8; 16]
//! ```
//!
//! A pad is a key: its numbers are row 0 of it. Erased, a pad is zeros, and does not fit its hash.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate};
use shmproto::layer::draw::{KEY_BYTES, Key};
use zeroize::Zeroizing;

use super::pad::Pad;
use crate::error::PoolError;

const CHECK_BYTES: usize = 16;

/// A file of pads.
#[derive(Debug)]
pub(super) struct PadFile {
    file: File,
    path: PathBuf,
    /// Hashed with every pad: those of other files, or pools, are none of this.
    identity: [u8; 32],
    /// Numbers of an answer.
    width: usize,
}

impl PadFile {
    pub(super) fn open(path: &Path, identity: [u8; 32], width: usize) -> Result<Self, PoolError> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.map_err(|source| PoolError::io(path, source))?;
        Ok(Self { file, path: path.to_owned(), identity, width })
    }

    /// Bytes of a pad.
    pub(super) fn pad_bytes(width: usize) -> u64 {
        (KEY_BYTES + 8 * width + CHECK_BYTES) as u64
    }

    /// Checks that so many pads are there.
    pub(super) fn expect(&self, made: u64) -> Result<(), PoolError> {
        let found = self.file.metadata().map_err(|source| PoolError::io(&self.path, source))?.len();
        let wanted = made.checked_mul(Self::pad_bytes(self.width));
        if wanted.is_some_and(|wanted| found >= wanted) {
            Ok(())
        } else {
            Err(PoolError::corrupt(&self.path, "it is shorter than the journal says"))
        }
    }

    fn check(&self, number: u64, body: &[u8]) -> [u8; CHECK_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.identity);
        hasher.update(&number.to_le_bytes()).update(body);
        let mut check = [0; CHECK_BYTES];
        check.copy_from_slice(&hasher.finalize().as_bytes()[..CHECK_BYTES]);
        check
    }

    /// Writes pads, the first of them being `number`: a key, and what the site makes of its row. They are on the disk then.
    pub(super) fn write(&self, number: u64, keys: &[Key], effects: &[u64]) -> Result<(), PoolError> {
        let mut bytes = Zeroizing::new(Vec::new());
        for ((key, effect), number) in keys.iter().zip(effects.chunks(self.width)).zip(number..) {
            let from = bytes.len();
            bytes.extend(key.bytes());
            effect.iter().for_each(|effect| bytes.extend(effect.to_le_bytes()));
            let check = self.check(number, &bytes[from..]);
            bytes.extend(check);
        }
        let at = number * Self::pad_bytes(self.width);
        let written = self.file.write_all_at(&bytes, at).and_then(|()| self.file.sync_data());
        failpoint::pass("client.pads_written");
        written.map_err(|source| PoolError::io(&self.path, source))
    }

    /// Reads a pad that is burnt already, and erases it.
    pub(super) fn take(&self, number: u64) -> Result<Pad, PoolError> {
        let failed = |source| PoolError::io(&self.path, source);
        let pad_bytes = Self::pad_bytes(self.width);
        let mut bytes = Zeroizing::new(vec![0; KEY_BYTES + 8 * self.width + CHECK_BYTES]);
        self.file.read_exact_at(&mut bytes, number * pad_bytes).map_err(failed)?;
        let (body, check) = bytes.split_at(bytes.len() - CHECK_BYTES);
        if self.check(number, body) != check {
            return Err(PoolError::corrupt(&self.path, "a pad does not fit its hash"));
        }
        failpoint::pass("client.pad_read");
        self.erase(number * pad_bytes, pad_bytes)?;
        failpoint::pass("client.pad_erased");
        let (key, effect) = body.split_at(KEY_BYTES);
        let key = <&[u8; KEY_BYTES]>::try_from(key)
            .map_err(|_| PoolError::corrupt(&self.path, "a pad without a key"))?;
        let effect = effect.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        Ok(Pad::new(Key::new(key), effect))
    }

    /// Makes a hole: the file system gives whole blocks back, and writes zeros to the rest of them.
    fn erase(&self, at: u64, bytes: u64) -> Result<(), PoolError> {
        let hole = fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, bytes);
        match hole {
            Ok(()) => Ok(()),
            // Some file systems have no holes.
            Err(_) => {
                let zeros = vec![0; usize::try_from(bytes).unwrap_or_default()];
                self.file.write_all_at(&zeros, at).map_err(|source| PoolError::io(&self.path, source))
            }
        }
    }
}
