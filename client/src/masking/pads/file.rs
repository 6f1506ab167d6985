//! The pads of a site in one direction, one behind the other.
//!
//! ```text
//! pad: key [u8; 32] | effect, as it travels | first half of BLAKE3(pool, file, number, all before) [u8; 16]
//! ```
//!
//! A pad is a key: its numbers are row 0 of it. Erased, a pad is zeros, and does not fit its hash.

use std::{
    fs::{File, OpenOptions},
    ops::Range,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate};
use shmproto::layer::draw::{KEY_BYTES, Key};
use zeroize::Zeroizing;

use super::pad::Pad;
use crate::error::PoolError;

const CHECK_BYTES: usize = 16;

/// Bytes of a pad with an effect of so many words.
fn pad_len(width: usize) -> usize {
    KEY_BYTES + 4 * width + CHECK_BYTES
}

/// A file of pads.
#[derive(Debug)]
pub(super) struct PadFile {
    file: File,
    path: PathBuf,
    /// Hashed with every pad: those of other files, or pools, are none of this.
    identity: [u8; 32],
    /// Words of 32 bits of an answer.
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
        pad_len(width) as u64
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
    pub(super) fn write(&self, number: u64, keys: &[Key], effects: &[f32]) -> Result<(), PoolError> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(keys.len() * pad_len(self.width)));
        for ((key, effect), number) in keys.iter().zip(effects.chunks(self.width)).zip(number..) {
            let from = bytes.len();
            bytes.extend(key.bytes());
            bytes.extend(bytemuck::cast_slice::<f32, u8>(effect));
            let check = self.check(number, &bytes[from..]);
            bytes.extend(check);
        }
        let at = number * Self::pad_bytes(self.width);
        let written = self.file.write_all_at(&bytes, at).and_then(|()| self.file.sync_data());
        failpoint::pass("client.pads_written");
        written.map_err(|source| PoolError::io(&self.path, source))
    }

    /// Reads pads that are burnt already into `room` and on to `pads`, and erases them.
    ///
    /// # Errors
    /// The disk fails, or one does not fit its hash: then none is to be used.
    pub(super) fn take(
        &self,
        numbers: Range<u64>,
        room: &mut Zeroizing<Vec<u8>>,
        pads: &mut Vec<Pad>,
    ) -> Result<(), PoolError> {
        let failed = |source| PoolError::io(&self.path, source);
        let at = numbers.start * pad_len(self.width) as u64;
        let count = usize::try_from(numbers.end - numbers.start).unwrap_or(usize::MAX);
        let bytes = count.saturating_mul(pad_len(self.width));
        if room.len() < bytes {
            room.resize(bytes, 0);
        }
        let room = &mut room[..bytes];
        self.file.read_exact_at(room, at).map_err(failed)?;
        for (pad, number) in room.chunks(pad_len(self.width)).zip(numbers) {
            pads.push(self.parse(pad, number)?);
        }
        failpoint::pass("client.pad_read");
        room.fill(0);
        self.file.write_all_at(room, at).map_err(failed)?;
        failpoint::pass("client.pad_erased");
        Ok(())
    }

    /// # Errors
    /// The pad does not fit its hash.
    fn parse(&self, pad: &[u8], number: u64) -> Result<Pad, PoolError> {
        let (body, check) = pad.split_at(pad.len() - CHECK_BYTES);
        let fits = self.check(number, body) == check;
        let Some((key, effect)) = body.split_first_chunk::<KEY_BYTES>().filter(|_| fits) else {
            return Err(PoolError::corrupt(&self.path, "a pad does not fit its hash"));
        };
        let effect = effect.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Ok(Pad::new(Key::new(key), effect))
    }

    /// Gives the blocks of pads that are erased back to the file system, if it takes them.
    pub(super) fn release(&self, numbers: Range<u64>) {
        let pad_bytes = Self::pad_bytes(self.width);
        let (at, bytes) = (numbers.start * pad_bytes, numbers.end.saturating_sub(numbers.start) * pad_bytes);
        if bytes > 0 {
            // Some file systems have no holes, and their zeros stay.
            let _ = fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, bytes);
        }
    }
}
