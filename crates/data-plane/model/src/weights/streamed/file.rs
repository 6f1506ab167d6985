//! The file of packed weights. A new file is written beside its final path and then renamed. Reads bypass the
//! page cache, and every read is checked.

#[cfg(test)]
mod tests;

use std::{
    fs::{self, File, OpenOptions},
    io,
    num::NonZeroU64,
    ops::Range,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use kernels::{PackedLayout, PackedMatrix, PageSlab};
use rustix::fs::{Advice, OFlags, fadvise};

use super::layout::{
    FileMatrix, GRAIN_ROWS, HASH_BYTES, HEADER_BYTES, LayerChunk, MatrixRows, PAGE_BYTES, WeightFileLayout,
    bytes_of,
};
use crate::{
    shape::source::WeightSource,
    weights::{
        elements,
        packing::{ProgressCallback, pack_all},
        tensors::{WeightsError, read_matrix},
    },
};

const MAGIC: [u8; 8] = *b"HOLO-WT\n";
const VERSION: u32 = 2;
/// Bytes of panels to pack, write or check at a time.
const STEP_BYTES: usize = 4 << 20;

/// Reasons why weights could not be read during a pass. The pass's results are then missing, never wrong.
#[derive(Debug, Clone, thiserror::Error)]
pub enum WeightReadError {
    /// The operating system reports a read error.
    #[error(
        "cannot read the packed weights in {}: {source}; check the disk, and send the request again",
        path.display()
    )]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: Arc<io::Error>,
    },
    /// The file is shorter than it should be.
    #[error(
        "the file of packed weights in {} is too short; restart the executor to pack them again",
        .0.display()
    )]
    Truncated(PathBuf),
    /// The contents differ from those written.
    #[error(
        "the packed weights in {} were changed or are damaged; restart the executor to pack them again; \
         if it happens again, check the disk",
        .0.display()
    )]
    Damaged(PathBuf),
    /// The thread that reads weights has ended.
    #[error("the thread that reads weights panicked; see the log and restart the executor")]
    ReaderEnded,
}

impl From<std::convert::Infallible> for WeightReadError {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

/// Reasons why a file of packed weights cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// The model's files do not match their configuration.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A file operation failed.
    #[error("cannot {action} {}: {source}; free disk space, or use another directory", path.display())]
    Io {
        /// Verb for the failed operation.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// The table after the header: a unit and hashes for each matrix.
#[derive(Debug)]
struct PackedTable {
    units: Vec<f32>,
    hashes: Vec<Vec<blake3::Hash>>,
}

impl PackedTable {
    fn to_bytes(&self) -> Vec<u8> {
        let of_matrix = |(unit, hashes): (&f32, &Vec<blake3::Hash>)| {
            let hashes = hashes.iter().flat_map(|hash| *hash.as_bytes());
            unit.to_le_bytes().into_iter().chain(hashes).collect::<Vec<u8>>()
        };
        self.units.iter().zip(&self.hashes).flat_map(of_matrix).collect()
    }

    fn parse(mut bytes: &[u8], matrices: &[FileMatrix]) -> Option<Self> {
        let mut table = Self { units: Vec::new(), hashes: Vec::new() };
        for matrix in matrices {
            let (unit, rest) = bytes.split_first_chunk()?;
            let (hashes, rest) = rest.split_at_checked(matrix.grains() * HASH_BYTES)?;
            table.units.push(f32::from_le_bytes(*unit));
            table.hashes.push(hashes.as_chunks().0.iter().map(|hash| (*hash).into()).collect());
            bytes = rest;
        }
        bytes.is_empty().then_some(table)
    }
}

fn header(key: &[u8; 32], matrices: usize, table: &[u8]) -> Vec<u8> {
    let count = u32::try_from(matrices).unwrap_or(u32::MAX);
    let (version, count, hash) = (VERSION.to_le_bytes(), count.to_le_bytes(), blake3::hash(table));
    [&MAGIC[..], &version, &count, key, hash.as_bytes()].concat()
}

#[derive(Debug)]
pub(super) struct PackedFile {
    path: PathBuf,
    file: File,
    /// Whether reads bypass the page cache; otherwise the kernel is advised to drop the pages.
    is_direct: bool,
    layout: WeightFileLayout,
    table: PackedTable,
}

impl PackedFile {
    /// Opens the file at `path` for the model of `source`; remakes a missing or damaged file or another
    /// `key`'s.
    ///
    /// # Errors
    /// The file cannot be made, or cannot be read although it was just made.
    pub(super) fn open_or_make(
        path: &Path,
        key: &[u8; 32],
        source: &(dyn WeightSource + Sync),
        threads: usize,
        on_progress: ProgressCallback<'_>,
    ) -> Result<Self, MakeError> {
        let failed = |action| move |source| MakeError::Io { action, path: path.to_owned(), source };
        let lock = lock(path).map_err(failed("lock"))?;
        match Self::open(path, key, WeightFileLayout::of(source)?) {
            Ok(file) => return Ok(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                tracing::info!(file = %path.display(), "packing the weights into a file, once");
            }
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "creating the file of packed weights again");
            }
        }
        make(path, key, source, &WeightFileLayout::of(source)?, threads, on_progress)?;
        let file = Self::open(path, key, WeightFileLayout::of(source)?).map_err(failed("read"));
        drop(lock);
        file
    }

    /// Opens a file, reads all of it and checks it.
    fn open(path: &Path, key: &[u8; 32], layout: WeightFileLayout) -> io::Result<Self> {
        let other = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let file = File::open(path)?;
        if file.metadata()?.len() != layout.end {
            return Err(other("it has the wrong length"));
        }
        let mut said = vec![0; HEADER_BYTES + layout.table_bytes()];
        file.read_exact_at(&mut said, 0)?;
        let (front, table) = said.split_at(HEADER_BYTES);
        if front != header(key, layout.matrices.len(), table) {
            return Err(other("it belongs to another model or program, or is damaged"));
        }
        let table =
            PackedTable::parse(table, &layout.matrices).ok_or_else(|| other("its table is damaged"))?;
        let direct = OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path);
        // Some file systems accept the flag on opening, but then refuse reads.
        let direct = direct.ok().filter(|direct| {
            let mut page = PageSlab::new(PAGE_BYTES).ok();
            let page = page.as_mut().and_then(PageSlab::as_mut_slice);
            page.is_some_and(|page| direct.read_exact_at(page, 0).is_ok())
        });
        let is_direct = direct.is_some();
        let opened = Self { path: path.to_owned(), file: direct.unwrap_or(file), is_direct, layout, table };
        opened.check_all()?;
        Ok(opened)
    }

    pub(super) fn layout(&self) -> &WeightFileLayout {
        &self.layout
    }

    /// Reads and checks every chunk once.
    fn check_all(&self) -> io::Result<()> {
        let mut slab = PageSlab::new(self.layout.chunk_bytes().max(self.layout.grain_bytes()))?;
        let bad = |error: WeightReadError| io::Error::new(io::ErrorKind::InvalidData, error);
        for chunk in &self.layout.chunks {
            self.load(&chunk.pages, &chunk.parts, slab.as_mut_slice().unwrap_or_default()).map_err(bad)?;
        }
        let embedding = &self.layout.matrices[self.layout.embedding];
        for token in (0..embedding.rows()).step_by(GRAIN_ROWS) {
            let (part, pages) = self.layout.embedding_grain(token);
            self.load(&pages, &[part], slab.as_mut_slice().unwrap_or_default()).map_err(bad)?;
        }
        Ok(())
    }

    /// Reads `pages` into the beginning of `into`, and checks the `parts` within them.
    ///
    /// # Errors
    /// The pages cannot be read, or the contents differ from those written.
    pub(super) fn load(
        &self,
        pages: &Range<u64>,
        parts: &[MatrixRows],
        into: &mut [u8],
    ) -> Result<(), WeightReadError> {
        let into = &mut into[..bytes_of(pages)];
        self.read(pages.start, into)?;
        for part in parts {
            let stored = &self.layout.matrices[part.matrix];
            let panels = &into[within(pages, &stored.range(&part.rows))];
            let hashes = &self.table.hashes[part.matrix][part.rows.start / GRAIN_ROWS..];
            let form = stored.form(1.0).of_rows(&part.rows);
            for (first, hash) in (0..form.rows()).step_by(GRAIN_ROWS).zip(hashes) {
                let end = form.rows().min(first + GRAIN_ROWS);
                if blake3::hash(&panels[form.offset(first)..form.offset(end)]) != *hash {
                    return Err(WeightReadError::Damaged(self.path.clone()));
                }
            }
        }
        Ok(())
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), WeightReadError> {
        match fill(into, |piece, from| self.file.read_at(piece, at + from)) {
            Ok(true) => {}
            Ok(false) => return Err(WeightReadError::Truncated(self.path.clone())),
            Err(source) => return Err(self.unreadable(source)),
        }
        if !self.is_direct {
            let bytes = NonZeroU64::new(into.len() as u64);
            // If the advice is refused, the kernel reclaims the memory when needed.
            let _ = fadvise(&self.file, at, bytes, Advice::DontNeed);
        }
        Ok(())
    }

    pub(super) fn unreadable(&self, source: io::Error) -> WeightReadError {
        WeightReadError::Io { path: self.path.clone(), source: Arc::new(source) }
    }

    /// Returns the matrices of `parts`, whose `pages` lie in `slab` from `at` on.
    pub(super) fn matrices(
        &self,
        pages: &Range<u64>,
        parts: &[MatrixRows],
        slab: &PageSlab,
        at: usize,
    ) -> Vec<PackedMatrix> {
        let matrix = |part: &MatrixRows| {
            let range = within(pages, &self.layout.matrices[part.matrix].range(&part.rows));
            let form = self.form(part.matrix).of_rows(&part.rows);
            PackedMatrix::within(slab, at + range.start, form).expect("the slab holds the pages")
        };
        parts.iter().map(matrix).collect()
    }

    pub(super) fn form(&self, matrix: usize) -> PackedLayout {
        self.layout.matrices[matrix].form(self.table.units[matrix])
    }

    pub(super) fn chunk(&self, chunk: usize) -> &LayerChunk {
        &self.layout.chunks[chunk]
    }
}

/// Fills complete pages by calls of `read` with buffer and offset. Returns false if the file ends too early.
fn fill(into: &mut [u8], mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>) -> io::Result<bool> {
    let mut filled = 0;
    while filled < into.len() {
        let end = into.len().min(filled + STEP_BYTES);
        match read(&mut into[filled..end], filled as u64) {
            // Direct reads must start at a page, so a partial page is read again.
            Ok(bytes) if bytes >= PAGE_BYTES => filled += bytes / PAGE_BYTES * PAGE_BYTES,
            Ok(_) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Returns the place of `range` in a buffer that begins at `pages`.
fn within(pages: &Range<u64>, range: &Range<u64>) -> Range<usize> {
    let place = |at: u64| usize::try_from(at - pages.start).unwrap_or(usize::MAX);
    place(range.start)..place(range.end)
}

/// Waits until no other process makes this file.
fn lock(path: &Path) -> io::Result<File> {
    let mut private = OpenOptions::new();
    private.write(true).create(true).truncate(false).mode(0o600);
    let lock = private.open(path.with_extension("lock"))?;
    lock.lock()?;
    Ok(lock)
}

/// Packs the model of `source` into a file beside `path`, and renames it once it is complete and synced.
fn make(
    path: &Path,
    key: &[u8; 32],
    source: &(dyn WeightSource + Sync),
    layout: &WeightFileLayout,
    threads: usize,
    on_progress: ProgressCallback<'_>,
) -> Result<(), MakeError> {
    let beside = path.with_extension("making");
    let failed = |action| {
        let path = beside.clone();
        move |source| MakeError::Io { action, path, source }
    };
    // A killed process may have left a partial file.
    let _ = fs::remove_file(&beside);
    let new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside);
    let new = new.map_err(failed("create"))?;
    new.set_len(layout.end).map_err(failed("size"))?;
    let elements = |stored: &FileMatrix| elements(source.config(), stored.id);
    let packed = pack_all(&layout.matrices, elements, threads, on_progress, |_, stored| {
        pack(source, stored, &new).map_err(|error| match error {
            NotPacked::Weights(error) => MakeError::Weights(error),
            NotPacked::Io(error) => failed("write")(error),
        })
    })?;
    let (units, hashes) = packed.into_iter().unzip();
    let table = PackedTable { units, hashes }.to_bytes();
    let front = [header(key, layout.matrices.len(), &table), table].concat();
    new.write_all_at(&front, 0).map_err(failed("write"))?;
    new.sync_all().map_err(failed("sync"))?;
    failpoint::pass("weights.before_rename");
    fs::rename(&beside, path).map_err(failed("rename"))?;
    let directory = path.parent().map(File::open);
    directory.map_or(Ok(()), |directory| directory?.sync_all()).map_err(failed("sync the directory of"))
}

enum NotPacked {
    Weights(WeightsError),
    Io(io::Error),
}

/// Packs a matrix into its place, a few rows at a time; returns its unit and the hashes of its rows.
fn pack(
    source: &(dyn WeightSource + Sync),
    stored: &FileMatrix,
    file: &File,
) -> Result<(f32, Vec<blake3::Hash>), NotPacked> {
    let id = stored.id;
    let tensor = read_matrix(source, id).map_err(NotPacked::Weights)?;
    let form = PackedLayout::of(tensor.kind, &tensor.data, tensor.rows, tensor.cols)
        .map_err(|source| NotPacked::Weights(WeightsError::Pack { id, source }))?;
    let row_bytes = tensor.data.len() / tensor.rows.max(1);
    let mut hashes = Vec::with_capacity(stored.grains());
    let mut panels = Vec::new();
    for rows in stored.cuts(STEP_BYTES) {
        let part = form.of_rows(&rows);
        panels.resize(part.bytes(), 0);
        part.pack(&tensor.data[rows.start * row_bytes..rows.end * row_bytes], &mut panels);
        for first in (0..part.rows()).step_by(GRAIN_ROWS) {
            let end = part.rows().min(first + GRAIN_ROWS);
            hashes.push(blake3::hash(&panels[part.offset(first)..part.offset(end)]));
        }
        file.write_all_at(&panels, stored.range(&rows).start).map_err(NotPacked::Io)?;
    }
    drop(tensor);
    source.release(id);
    failpoint::pass("weights.packed_matrix");
    Ok((form.unit(), hashes))
}
