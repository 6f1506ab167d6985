//! Pads on a disk, each of which is used once or never.
//!
//! ```text
//! manifest            of which weights its pads are
//! journal             which pads there are, and which are gone
//! 00012.forward       pads of site 12; `.backward` those of gradients
//! ```
//!
//! Before a pad is used, the journal says that it is gone, and is on the disk, and its key is erased there; so that a process, or a machine, that dies loses what
//! it has burnt, and uses nothing twice; one that ends in order gives back what it has not taken. One process holds a pool. A copy of
//! a pool is refused, because its original may be used too; no program can tell a disk that was put back to an earlier state: never do
//! that to a pool.

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

/// Pads that were taken out of a pool: numbers that cover rows, once.
pub struct TakenPads {
    /// Of the pool's.
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
    /// What they are made from, each of them. It tells it from all others.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }
}

/// A pool that this process holds.
#[derive(Debug)]
pub struct PadPool {
    path: PathBuf,
    /// Held as long as it is open.
    _lock: File,
    commitment: [u8; 32],
    shapes: Vec<PadShape>,
    journal: Journal,
    /// By site and direction, as the journal's marks.
    files: Vec<PadFile>,
    /// Of each file: the next pad.
    next: Vec<u64>,
    /// Of each file: pads whose blocks were given back.
    released: Vec<u64>,
    /// Where pads are read to.
    room: Zeroizing<Vec<u8>>,
}

impl PadPool {
    /// The pool in a directory, made if there is none, of weights with this `commitment`.
    ///
    /// # Errors
    /// It is another's, broken, or held.
    pub fn create(path: &Path, commitment: [u8; 32], shapes: &[PadShape]) -> Result<Self, PoolError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|source| PoolError::io(path, source))?;
        let lock = lock(path)?;
        if !path.join("manifest").exists() {
            // What a process left behind that died here: it has no pad yet.
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

    /// The pool in a directory.
    ///
    /// # Errors
    /// There is none, it is broken, or held.
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
        // What was burnt by who died is lost: nobody knows how much of it was used.
        let next = journal.marks.iter().map(|mark| mark.burnt).collect();
        let (released, room) = (vec![0; files.len()], Zeroizing::default());
        let path = path.to_owned();
        Ok(Self { path, _lock: lock, commitment, shapes, journal, files, next, released, room })
    }

    /// # Errors
    /// Its pads are of other weights.
    pub fn expect(&self, commitment: &[u8; 32], shapes: &[PadShape]) -> Result<(), PoolError> {
        if self.commitment == *commitment && self.shapes == shapes {
            Ok(())
        } else {
            Err(PoolError::OtherWeights { path: self.path.clone() })
        }
    }

    /// The shapes of its sites.
    #[must_use]
    pub fn shapes(&self) -> &[PadShape] {
        &self.shapes
    }

    /// Pads of a site that are left.
    #[must_use]
    pub fn left(&self, site: SiteId, direction: Direction) -> u64 {
        self.index(site, direction).map_or(0, |at| self.journal.marks[at].made.saturating_sub(self.next[at]))
    }

    /// Bytes of all pads that are left.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let file = |(at, mark): (usize, &PadProgress)| {
            let direction = if at % 2 == 0 { Direction::Forward } else { Direction::Backward };
            let width = self.shapes[at / 2].words(direction).1;
            mark.made.saturating_sub(self.next[at]) * PadFile::pad_bytes(width)
        };
        self.journal.marks.iter().enumerate().map(file).sum()
    }

    /// Bytes of the pads of a token in one direction.
    #[must_use]
    pub fn token_bytes(&self, direction: Direction) -> u64 {
        self.shapes.iter().map(|shape| PadFile::pad_bytes(shape.words(direction).1)).sum()
    }

    /// Takes pads for so many rows out. They are gone, also if this process ends before it uses them.
    ///
    /// # Errors
    /// There are not so many, or the disk fails: then none is to be used.
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
            // First: whatever becomes of them, they are not taken again.
            self.next[at] = until;
            self.files[at].take_keys(number..until, &mut self.room, &mut keys)?;
        }
        Ok(TakenPads { file: at, numbers: first..end, keys })
    }

    /// Reads what the site makes of pads that were taken, as it travels, once: it is erased then.
    ///
    /// # Errors
    /// The disk fails, or one does not fit its hash.
    pub fn effects(&mut self, taken: &TakenPads, effects: &mut Vec<f32>) -> Result<(), PoolError> {
        let file = &self.files[taken.file];
        let words = taken.keys.len() * file.width();
        if effects.capacity() < words {
            // None is left behind where there was not room enough.
            effects.zeroize();
            effects.reserve_exact(words);
        }
        effects.clear();
        file.take_effects(taken.numbers.clone(), &mut self.room, effects)
    }

    /// Burns so many next pads of a file, or more, as far as one generation may, and the next ones of those in step with it, which
    /// will be asked for them soon: a token takes one of each.
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

    /// Adds pads: keys, and what the site makes of their rows. They may count once they are on the disk.
    pub(super) fn add(
        &mut self,
        site: SiteId,
        direction: Direction,
        keys: &[Key],
        effects: &[f32],
    ) -> Result<Option<UnsyncedFile>, PoolError> {
        let Some(at) = self.index(site, direction) else { return Ok(None) };
        let mark = self.journal.marks[at];
        // Behind what was given up as well.
        let first = mark.made.max(mark.burnt);
        self.files[at].release(self.released[at]..self.next[at]);
        self.released[at] = self.next[at];
        let written = self.files[at].write(first, keys, effects)?;
        self.journal.marks[at] = PadProgress { made: first + keys.len() as u64, ..mark };
        Ok(Some(written))
    }

    /// What was added, and is on the disk, counts from now on.
    pub(super) fn publish(&mut self) -> Result<(), PoolError> {
        self.journal.commit()
    }

    fn index(&self, site: SiteId, direction: Direction) -> Option<usize> {
        let site = site.0 as usize;
        (site < self.shapes.len()).then_some(2 * site + direction as usize)
    }
}

impl Drop for PadPool {
    /// What was burnt and not taken is whole, and nobody takes it from here any more: it burns again for who does.
    fn drop(&mut self) {
        let marks = self.journal.marks.iter_mut().zip(&self.next);
        let given_back =
            marks.map(|(mark, &next)| std::mem::replace(&mut mark.burnt, next) - next).sum::<u64>();
        if given_back > 0 {
            // Otherwise it is lost, as if this process had been killed.
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
