//! The pads of a site in one direction, in blocks of 64.
//!
//! ```text
//! block    64 times: key [u8; 32] | check [u8; 16]
//!          64 times: effect, as it travels | check [u8; 16]
//! check    first half of BLAKE3, keyed by pool and file, of: 2 * pad number, + 1 for effects, u64 | content
//! ```
//!
//! A pad is a key, and its values are row 0 of the key. Keys lie together, because rows can be sent as soon
//! as the keys are known; effects are needed for the answers. An erased pad is zeros and fails its checks.

use std::{
    fs::{File, OpenOptions},
    ops::Range,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{FallocateFlags, fallocate};
use shmproto::layer::seeded_rows::{KEY_BYTES, Key, overwrite_stack};
use zeroize::Zeroizing;

use crate::error::PoolError;

const CHECK_BYTES: usize = 16;

const BLOCK: u64 = 64;

/// A part of a pad that has its own check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PadPart {
    Key,
    Effect,
}

#[derive(Debug)]
pub(super) struct PadFile {
    file: Arc<File>,
    path: PathBuf,
    /// Key of the checks, so that pads of other files or pools are not accepted here.
    identity: [u8; 32],
    /// Words of 32 bits per answer.
    width: usize,
}

/// A file with unsynced writes: its new pads are durable after `sync`.
#[derive(Debug)]
#[must_use]
pub(super) struct UnsyncedFile {
    file: Arc<File>,
    path: PathBuf,
}

impl UnsyncedFile {
    pub(super) fn sync(self) -> Result<(), PoolError> {
        self.file.sync_data().map_err(|source| PoolError::io(&self.path, source))
    }
}

impl PadFile {
    pub(super) fn open(path: &Path, identity: [u8; 32], width: usize) -> Result<Self, PoolError> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = Arc::new(file.map_err(|source| PoolError::io(path, source))?);
        Ok(Self { file, path: path.to_owned(), identity, width })
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn pad_bytes(width: usize) -> u64 {
        record_bytes(PadPart::Key, width) + record_bytes(PadPart::Effect, width)
    }

    fn place(&self, part: PadPart, number: u64) -> u64 {
        let (block, at) = (number / BLOCK, number % BLOCK);
        let before = match part {
            PadPart::Key => 0,
            PadPart::Effect => BLOCK * record_bytes(PadPart::Key, self.width),
        };
        block * BLOCK * Self::pad_bytes(self.width) + before + at * record_bytes(part, self.width)
    }

    /// Checks that the file holds `made` pads.
    pub(super) fn expect(&self, made: u64) -> Result<(), PoolError> {
        let found = self.file.metadata().map_err(|source| PoolError::io(&self.path, source))?.len();
        // No file could hold so many pads.
        let is_sane = made <= u64::MAX / Self::pad_bytes(self.width) / 2;
        let wanted =
            |last: u64| self.place(PadPart::Effect, last) + record_bytes(PadPart::Effect, self.width);
        if is_sane && made.checked_sub(1).is_none_or(|last| found >= wanted(last)) {
            Ok(())
        } else {
            Err(PoolError::corrupt(&self.path, "it is shorter than the journal says"))
        }
    }

    /// A separate function, because its callers overwrite the stack that it used, which may hold keys.
    #[inline(never)]
    fn check(&self, part: PadPart, number: u64, bytes: &[u8]) -> [u8; CHECK_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.identity);
        let name = 2 * number + u64::from(part == PadPart::Effect);
        hasher.update(&name.to_le_bytes()).update(bytes);
        let mut check = [0; CHECK_BYTES];
        check.copy_from_slice(&hasher.finalize().as_bytes()[..CHECK_BYTES]);
        check
    }

    /// Writes pads from `number` on: keys, and the effects of their rows.
    pub(super) fn write(
        &self,
        number: u64,
        keys: &[Key],
        effects: &[f32],
    ) -> Result<UnsyncedFile, PoolError> {
        let (mut keys, mut effects) = (keys, effects);
        for run in runs(number..number + keys.len() as u64) {
            let count = usize::try_from(run.end - run.start).unwrap_or(usize::MAX);
            let (some_keys, some_effects);
            (some_keys, keys) = keys.split_at(count);
            (some_effects, effects) = effects.split_at(count * self.width);
            let some_keys = some_keys.iter().map(|key| &key.bytes()[..]);
            self.write_run(PadPart::Key, run.start, some_keys)?;
            let some_effects = some_effects.chunks(self.width).map(bytemuck::cast_slice);
            self.write_run(PadPart::Effect, run.start, some_effects)?;
        }
        failpoint::pass("client.pads_written");
        Ok(UnsyncedFile { file: Arc::clone(&self.file), path: self.path.clone() })
    }

    fn write_run<'a>(
        &self,
        part: PadPart,
        first: u64,
        parts: impl ExactSizeIterator<Item = &'a [u8]>,
    ) -> Result<(), PoolError> {
        let record_bytes = usize::try_from(record_bytes(part, self.width)).unwrap_or(usize::MAX);
        let mut records = Zeroizing::new(Vec::with_capacity(parts.len() * record_bytes));
        for (number, bytes) in (first..).zip(parts) {
            records.extend_from_slice(bytes);
            records.extend(self.check(part, number, bytes));
        }
        overwrite_stack();
        let written = self.file.write_all_at(&records, self.place(part, first));
        written.map_err(|source| PoolError::io(&self.path, source))
    }

    /// Reads the keys of burnt pads into `buffer` and appends them to `keys`, then erases them on disk.
    ///
    /// # Errors
    /// Fails if the disk fails or a key fails its check. The caller must then use none of them.
    pub(super) fn take_keys(
        &self,
        numbers: Range<u64>,
        buffer: &mut Zeroizing<Vec<u8>>,
        keys: &mut Vec<Key>,
    ) -> Result<(), PoolError> {
        for run in runs(numbers) {
            self.take(PadPart::Key, run, buffer, ["client.pad_read", "client.pad_erased"], |key| {
                keys.extend(key.first_chunk().map(Key::new));
            })?;
        }
        Ok(())
    }

    /// Reads and erases the effects of pads, as [`take_keys`](Self::take_keys) does with keys.
    pub(super) fn take_effects(
        &self,
        numbers: Range<u64>,
        buffer: &mut Zeroizing<Vec<u8>>,
        effects: &mut Vec<f32>,
    ) -> Result<(), PoolError> {
        for run in runs(numbers) {
            self.take(
                PadPart::Effect,
                run,
                buffer,
                ["client.effects_read", "client.effects_erased"],
                |effect| {
                    effects.extend(effect.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
                },
            )?;
        }
        Ok(())
    }

    /// Reads parts of pads in one block, and erases them on disk.
    fn take(
        &self,
        part: PadPart,
        run: Range<u64>,
        buffer: &mut Zeroizing<Vec<u8>>,
        [read, erased]: [&'static str; 2],
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), PoolError> {
        let failed = |source| PoolError::io(&self.path, source);
        let record_bytes = record_bytes(part, self.width);
        let bytes = usize::try_from((run.end - run.start) * record_bytes).unwrap_or(usize::MAX);
        if buffer.len() < bytes {
            // No secret is left behind by the reallocation: `buffer` is zeros.
            buffer.resize(bytes, 0);
        }
        let (buffer, at) = (&mut buffer[..bytes], self.place(part, run.start));
        self.file.read_exact_at(buffer, at).map_err(failed)?;
        let records = buffer.chunks(usize::try_from(record_bytes).unwrap_or(usize::MAX));
        let mut fits = true;
        for (record, number) in records.zip(run) {
            let (bytes, check) = record.split_at(record.len() - CHECK_BYTES);
            fits &= self.check(part, number, bytes) == check;
            take(bytes);
        }
        overwrite_stack();
        failpoint::pass(read);
        buffer.fill(0);
        self.file.write_all_at(buffer, at).map_err(failed)?;
        failpoint::pass(erased);
        if fits { Ok(()) } else { Err(PoolError::corrupt(&self.path, "a pad does not fit its hash")) }
    }

    /// Returns the blocks of erased pads to the file system, if it supports holes.
    pub(super) fn release(&self, numbers: Range<u64>) {
        for run in runs(numbers) {
            for part in [PadPart::Key, PadPart::Effect] {
                let bytes = (run.end - run.start) * record_bytes(part, self.width);
                // Without holes the zeros stay in the file.
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(&self.file, mode, self.place(part, run.start), bytes);
            }
        }
    }
}

/// Returns the bytes of a part of a pad and its check; an effect has `width` words.
fn record_bytes(part: PadPart, width: usize) -> u64 {
    let bytes = match part {
        PadPart::Key => KEY_BYTES,
        PadPart::Effect => 4 * width,
    };
    (bytes + CHECK_BYTES) as u64
}

/// Splits `numbers` at block boundaries.
fn runs(numbers: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut first = numbers.start;
    std::iter::from_fn(move || {
        let run = first..numbers.end.min((first / BLOCK + 1) * BLOCK);
        first = run.end;
        (!run.is_empty()).then_some(run)
    })
}
