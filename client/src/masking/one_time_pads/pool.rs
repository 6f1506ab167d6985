//! Pads on disk, each of which is used at most once.
//!
//! ```text
//! manifest            weights of the pads
//! journal             which pads exist, and which are gone
//! 00012.forward       pads of site 12; `.backward` for gradients
//! ```
//!
//! Before a pad is used, a synced journal entry says that it is gone, and its key is erased on disk. So a
//! process or machine that crashes loses its burnt pads but never uses one twice; a process that ends
//! normally gives back the untaken ones.
//!
//! One process holds a pool. A copy of a pool is refused, because its original may be in use too. No program
//! can detect a disk that was restored to an earlier state: never restore a pool.

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use model::linear_sites::SiteId;
use rustix::fs::{FlockOperation, flock};
use shmproto::layer::seeded_rows::Key;
use zeroize::{Zeroize as _, Zeroizing};

pub use super::shape::PadShape;
use super::{
    file::{PadFile, UnsyncedFile},
    journal::{BURN_PADS, Journal, MAX_BURN_PADS, PadProgress},
    manifest::Manifest,
};
pub use crate::error::PoolError;
use crate::masking::Direction;

/// Pads taken out of a pool, to cover rows once.
pub struct TakenPads {
    /// Index of the file in the pool.
    file: usize,
    numbers: Range<u64>,
    keys: Vec<Key>,
}

impl fmt::Debug for TakenPads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Taken").field("pads", &self.numbers).finish_non_exhaustive()
    }
}

impl TakenPads {
    /// Returns the keys, one per pad, each of which is unique.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }
}

/// An open pool, which this process holds.
#[derive(Debug)]
pub struct PadPool {
    path: PathBuf,
    /// Lock of the directory, held while the pool is open.
    _lock: File,
    commitment: [u8; 32],
    shapes: Vec<PadShape>,
    journal: Journal,
    /// Files by site and direction, in the order of the journal's counters.
    files: Vec<PadFile>,
    next: Vec<u64>,
    /// Number of pads of each file whose disk blocks were released.
    released: Vec<u64>,
    buffer: Zeroizing<Vec<u8>>,
}

impl PadPool {
    /// Opens the pool in a directory, and creates it if it is missing, for weights with this `commitment`.
    ///
    /// # Errors
    /// Fails if the pool has other weights, is damaged, or is held by another process.
    pub fn create(path: &Path, commitment: [u8; 32], shapes: &[PadShape]) -> Result<Self, PoolError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|source| PoolError::io(path, source))?;
        let lock = lock(path)?;
        if !path.join("manifest").exists() {
            // A journal without a manifest is left from a crash during creation and has no pads.
            let _ = fs::remove_file(path.join("journal"));
            let journal = Journal::create(&path.join("journal"), 2 * shapes.len())?;
            let identity = journal.identity().map_err(|source| PoolError::io(path, source))?;
            let random =
                crate::secrets::key().map_err(|error| PoolError::io(path, io::Error::other(error)))?;
            let shapes = shapes.to_vec();
            Manifest { commitment, identity, random: *random.bytes(), shapes }.write(path)?;
        }
        let pool = Self::with(path, lock)?;
        pool.expect(&commitment, shapes)?;
        Ok(pool)
    }

    /// Opens the pool in a directory.
    ///
    /// # Errors
    /// Fails if there is no pool, it is damaged, or another process holds it.
    pub fn open(path: &Path) -> Result<Self, PoolError> {
        if !path.join("manifest").exists() {
            return Err(PoolError::Absent { path: path.to_owned() });
        }
        Self::with(path, lock(path)?)
    }

    fn with(path: &Path, lock: File) -> Result<Self, PoolError> {
        let Manifest { commitment, identity, random, shapes } = Manifest::read(path)?;
        let journal = Journal::open(&path.join("journal"), 2 * shapes.len())?;
        let found = journal.identity().map_err(|source| PoolError::io(path, source))?;
        if found != identity {
            return Err(PoolError::Copied { path: path.to_owned() });
        }
        let mut files = Vec::with_capacity(2 * shapes.len());
        for (number, shape) in shapes.iter().enumerate() {
            for direction in [Direction::Forward, Direction::Backward] {
                let name = format!("{number:05}.{}", as_str(direction));
                let of_file = blake3::keyed_hash(&random, name.as_bytes()).into();
                let file = PadFile::open(&path.join(name), of_file, shape.words(direction).1)?;
                file.expect(journal.marks[files.len()].made)?;
                files.push(file);
            }
        }
        // Pads burnt by a process that crashed are lost, because it may have used them.
        let next = journal.marks.iter().map(|mark| mark.burnt).collect();
        let (released, buffer) = (vec![0; files.len()], Zeroizing::default());
        let path = path.to_owned();
        Ok(Self { path, _lock: lock, commitment, shapes, journal, files, next, released, buffer })
    }

    /// Checks that the pads belong to weights with this `commitment` and `shapes`.
    ///
    /// # Errors
    /// Fails with [`PoolError::OtherWeights`] if they do not.
    pub fn expect(&self, commitment: &[u8; 32], shapes: &[PadShape]) -> Result<(), PoolError> {
        if self.commitment == *commitment && self.shapes == shapes {
            Ok(())
        } else {
            Err(PoolError::OtherWeights { path: self.path.clone() })
        }
    }

    /// Returns the shapes of all sites.
    #[must_use]
    pub fn shapes(&self) -> &[PadShape] {
        &self.shapes
    }

    /// Returns the number of unused pads of a site.
    #[must_use]
    pub fn left(&self, site: SiteId, direction: Direction) -> u64 {
        self.index(site, direction).map_or(0, |at| self.journal.marks[at].made.saturating_sub(self.next[at]))
    }

    /// Returns the bytes of all unused pads.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let file = |(at, mark): (usize, &PadProgress)| {
            let direction = if at % 2 == 0 { Direction::Forward } else { Direction::Backward };
            let width = self.shapes[at / 2].words(direction).1;
            mark.made.saturating_sub(self.next[at]) * PadFile::pad_bytes(width)
        };
        self.journal.marks.iter().enumerate().map(file).sum()
    }

    /// Returns the bytes of one token's pads in one direction.
    #[must_use]
    pub fn token_bytes(&self, direction: Direction) -> u64 {
        self.shapes.iter().map(|shape| PadFile::pad_bytes(shape.words(direction).1)).sum()
    }

    /// Takes out pads for `rows` rows. The pads are gone even if this process ends before it uses them.
    ///
    /// # Errors
    /// Fails if fewer pads are left or the disk fails. The caller must then use none of them.
    pub fn take(&mut self, site: SiteId, direction: Direction, rows: u64) -> Result<TakenPads, PoolError> {
        let left = self.left(site, direction);
        let Some(at) = self.index(site, direction).filter(|_| left >= rows) else {
            let shapes = self.shapes.iter().map(|shape| [shape.columns as usize, shape.outputs as usize]);
            let name = crate::masking::site_name(site, &shapes.collect::<Vec<_>>());
            return Err(PoolError::Empty {
                site: format!("{name}, {}", as_str(direction)),
                left,
                wanted: rows,
            });
        };
        let (first, end) = (self.next[at], self.next[at] + rows);
        let mut keys = Vec::new();
        while self.next[at] < end {
            let number = self.next[at];
            if number >= self.journal.marks[at].burnt {
                self.burn(at, end - number)?;
            }
            let until = end.min(self.journal.marks[at].burnt);
            // The counter moves first, so that these pads are not taken again after an error.
            self.next[at] = until;
            self.files[at].take_keys(number..until, &mut self.buffer, &mut keys)?;
        }
        Ok(TakenPads { file: at, numbers: first..end, keys })
    }

    /// Reads the effects of taken pads in wire format, and erases them on disk; possible once.
    ///
    /// # Errors
    /// Fails if the disk fails, or an effect fails its check.
    pub fn effects(&mut self, taken: &TakenPads, effects: &mut Vec<f32>) -> Result<(), PoolError> {
        let file = &self.files[taken.file];
        let words = taken.keys.len() * file.width();
        if effects.capacity() < words {
            // The old buffer is erased before it is reallocated.
            effects.zeroize();
            effects.reserve_exact(words);
        }
        effects.clear();
        file.take_effects(taken.numbers.clone(), &mut self.buffer, effects)
    }

    /// Burns at least `wanted` further pads of file `at`, up to the maximum of a generation. Also burns pads
    /// of files that are about to run out in the same direction, because each token takes one pad of each
    /// site.
    fn burn(&mut self, at: usize, wanted: u64) -> Result<(), PoolError> {
        let before = self.journal.marks.clone();
        for (other, mark) in self.journal.marks.iter_mut().enumerate() {
            let in_hand = mark.burnt.saturating_sub(self.next[other]);
            let is_in_step = other % 2 == at % 2 && in_hand < BURN_PADS / 4;
            let pads = if other == at { wanted.clamp(BURN_PADS, MAX_BURN_PADS) } else { BURN_PADS };
            if other == at || is_in_step {
                mark.burnt = (mark.burnt + pads).min(mark.made.max(mark.burnt));
            }
        }
        self.journal.commit().inspect_err(|_| self.journal.marks = before)
    }

    /// Writes new pads: keys, and effects of their rows. [`publish`](Self::publish) makes them available.
    pub(super) fn add(
        &mut self,
        site: SiteId,
        direction: Direction,
        keys: &[Key],
        effects: &[f32],
    ) -> Result<Option<UnsyncedFile>, PoolError> {
        let Some(at) = self.index(site, direction) else { return Ok(None) };
        let mark = self.journal.marks[at];
        // New pads follow those that were given up, too.
        let first = mark.made.max(mark.burnt);
        self.files[at].release(self.released[at]..self.next[at]);
        self.released[at] = self.next[at];
        let written = self.files[at].write(first, keys, effects)?;
        self.journal.marks[at] = PadProgress { made: first + keys.len() as u64, ..mark };
        Ok(Some(written))
    }

    /// Makes the added pads available; they must be on disk.
    pub(super) fn publish(&mut self) -> Result<(), PoolError> {
        self.journal.commit()
    }

    fn index(&self, site: SiteId, direction: Direction) -> Option<usize> {
        let site = site.0 as usize;
        (site < self.shapes.len()).then_some(2 * site + direction as usize)
    }
}

impl Drop for PadPool {
    /// Returns pads that are marked as used but were not read: their keys are still on disk, so the next
    /// process can use them.
    fn drop(&mut self) {
        let marks = self.journal.marks.iter_mut().zip(&self.next);
        let given_back =
            marks.map(|(mark, &next)| std::mem::replace(&mut mark.burnt, next) - next).sum::<u64>();
        if given_back > 0 {
            // Without this entry they are lost, as if this process had been killed.
            let _ = self.journal.commit();
        }
    }
}

fn as_str(direction: Direction) -> &'static str {
    match direction {
        Direction::Forward => "forward",
        Direction::Backward => "backward",
    }
}

fn lock(path: &Path) -> Result<File, PoolError> {
    let name = path.join("lock");
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(&name);
    let file = file.map_err(|source| PoolError::io(&name, source))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(PoolError::Held { path: path.to_owned() }),
        Err(errno) => Err(PoolError::io(&name, errno.into())),
    }
}
