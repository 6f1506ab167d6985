//! Writes a sparse copy of a model's files from the parts that an executor sends.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

use model_files::model_files::SPARSE_COPY;

use super::{ClientWeightsFile, MAX_FILES, MAX_RANGES};

/// Maximum length of a file, holes included.
const MAX_FILE_BYTES: u64 = 1 << 44;
const MAX_NAME_BYTES: usize = 255;

/// Reasons why a sparse copy was not made.
#[derive(Debug, thiserror::Error)]
pub enum SparseCopyError {
    /// The executor's list of files is invalid.
    #[error("the executor's list of files is not valid: {reason}; use another executor")]
    List {
        /// Defect of the list.
        reason: String,
    },
    /// The list exceeds the caller's byte budget.
    #[error(
        "the skeleton has {planned} bytes and the limit is {budget}; raise it or use a copy of the model"
    )]
    Budget {
        /// Bytes that the list announces.
        planned: u64,
        /// Maximum bytes that the caller accepts.
        budget: u64,
    },
    /// The executor sent more bytes than requested.
    #[error("the executor sent {found} bytes instead of at most {wanted}; use another executor")]
    Bytes {
        /// Number of bytes requested.
        wanted: u64,
        /// Number of bytes received.
        found: u64,
    },
    /// The copy is not complete yet.
    #[error("the sparse copy is not complete: {missing} bytes are missing; fetch the rest first")]
    Incomplete {
        /// Number of missing bytes.
        missing: u64,
    },
    /// A file operation failed.
    #[error("cannot write {}: {source}; free disk space or use another directory", path.display())]
    Write {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// The next part of the files to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchRange {
    /// Index of the file in the list.
    pub file: usize,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes up to the end of the range.
    pub bytes: u64,
}

/// A sparse copy in progress: a temporary directory beside the final one, removed unless it is finished.
#[derive(Debug)]
pub struct SparseCopy {
    directory: PathBuf,
    temporary: PathBuf,
    files: Vec<File>,
    /// Ranges still to fetch, the next one last.
    wanted: Vec<(usize, Range<u64>)>,
}

static COPIES: AtomicU64 = AtomicU64::new(0);

impl SparseCopy {
    /// Begins a copy at `directory`; the ranges of `files` may have at most `budget_bytes` bytes.
    ///
    /// # Errors
    /// The list is invalid or beyond the budget (then nothing is written), or a file cannot be created.
    pub fn create(
        directory: &Path,
        files: &[ClientWeightsFile],
        budget_bytes: u64,
    ) -> Result<Self, SparseCopyError> {
        check(files, budget_bytes)?;
        let temporary = temporary_name(directory);
        let parent = temporary.parent().unwrap_or(directory);
        fs::create_dir_all(parent).map_err(cannot_write(parent))?;
        fs::create_dir(&temporary).map_err(cannot_write(&temporary))?;
        let mut copy =
            Self { directory: directory.to_path_buf(), temporary, files: Vec::new(), wanted: Vec::new() };
        let mark = copy.temporary.join(SPARSE_COPY);
        fs::write(&mark, "A client's copy of a model, without its linear layers.\n")
            .map_err(cannot_write(&mark))?;
        for file in files {
            let path = copy.temporary.join(&file.name);
            copy.files.push(sparse(&path, file.bytes).map_err(cannot_write(&path))?);
        }
        let ranges = |(number, file): (usize, &ClientWeightsFile)| {
            file.ranges.iter().map(|range| (number, range.clone())).collect::<Vec<_>>()
        };
        copy.wanted = files.iter().enumerate().flat_map(ranges).rev().collect();
        Ok(copy)
    }

    /// Returns the next range to fetch, or `None` when the copy is complete.
    #[must_use]
    pub fn wanted(&self) -> Option<FetchRange> {
        let (file, range) = self.wanted.last()?;
        Some(FetchRange { file: *file, offset: range.start, bytes: range.end - range.start })
    }

    /// Writes the next bytes of the [`wanted`](Self::wanted) range, all of it or a part.
    ///
    /// # Errors
    /// `bytes` is empty or longer than the range, or a file operation fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), SparseCopyError> {
        let found = bytes.len() as u64;
        let wanted = self.wanted().map_or(0, |wanted| wanted.bytes);
        let Some((file, range)) = self.wanted.last_mut().filter(|_| found > 0 && found <= wanted) else {
            return Err(SparseCopyError::Bytes { wanted, found });
        };
        self.files[*file].write_all_at(bytes, range.start).map_err(cannot_write(&self.temporary))?;
        range.start += found;
        if range.is_empty() {
            self.wanted.pop();
        }
        Ok(())
    }

    /// Renames the copy to its final name, or uses an existing copy; names must identify contents.
    ///
    /// # Errors
    /// Ranges are still missing, or a file operation fails.
    pub fn finish(mut self) -> Result<PathBuf, SparseCopyError> {
        if !self.wanted.is_empty() {
            let missing = self.wanted.iter().map(|(_, range)| range.end - range.start).sum();
            return Err(SparseCopyError::Incomplete { missing });
        }
        for file in self.files.drain(..) {
            // A copy under its final name must be complete, even after a power failure.
            file.sync_all().map_err(cannot_write(&self.temporary))?;
        }
        match fs::rename(&self.temporary, &self.directory) {
            Ok(()) => Ok(self.directory.clone()),
            Err(_) if self.directory.join(SPARSE_COPY).exists() => Ok(self.directory.clone()),
            Err(source) => Err(cannot_write(&self.directory)(source)),
        }
    }
}

impl Drop for SparseCopy {
    fn drop(&mut self) {
        // A finished copy has been renamed, so nothing is left under the temporary name.
        drop(fs::remove_dir_all(&self.temporary));
    }
}

/// Returns an unused name beside `directory`, distinct from names that a killed process may have left.
fn temporary_name(directory: &Path) -> PathBuf {
    let name = directory.file_name().map(|name| name.display().to_string()).unwrap_or_default();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let number = COPIES.fetch_add(1, Ordering::Relaxed);
    directory.with_file_name(format!(".{name}.{}-{now:x}-{number}", std::process::id()))
}

fn cannot_write(path: &Path) -> impl FnOnce(io::Error) -> SparseCopyError + '_ {
    move |source| SparseCopyError::Write { path: path.to_path_buf(), source }
}

/// Creates a file of `bytes` bytes without allocated blocks.
fn sparse(path: &Path, bytes: u64) -> io::Result<File> {
    let file = File::create_new(path)?;
    file.set_len(bytes)?;
    Ok(file)
}

fn check(files: &[ClientWeightsFile], budget: u64) -> Result<(), SparseCopyError> {
    let refused = |reason| Err(SparseCopyError::List { reason });
    if files.is_empty() || files.len() > MAX_FILES {
        return refused(format!("it has {} files, and 1 to {MAX_FILES} are supported", files.len()));
    }
    let (mut names, mut planned) = (HashSet::new(), 0u64);
    for file in files {
        let shown = file.name.escape_debug();
        if !is_plain(&file.name) || !names.insert(&file.name) {
            return refused(format!("\"{shown}\" is not a plain file name, or appears twice"));
        }
        if file.bytes > MAX_FILE_BYTES || file.ranges.len() > MAX_RANGES || !are_apart(file) {
            return refused(format!("the length or the ranges of \"{shown}\" are not valid"));
        }
        planned = planned.saturating_add(file.planned_bytes());
    }
    if planned > budget { Err(SparseCopyError::Budget { planned, budget }) } else { Ok(()) }
}

/// True for names that are not hidden and contain no path separator.
fn is_plain(name: &str) -> bool {
    let is_usual = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|byte| is_usual(byte) && byte != b'/' && byte != b'\\')
}

/// True if the ranges are ascending, not empty, disjoint and within the file.
fn are_apart(file: &ClientWeightsFile) -> bool {
    let mut end = 0;
    file.ranges.iter().all(|range| {
        let apart = range.start >= end && range.start < range.end && range.end <= file.bytes;
        end = range.end;
        apart
    })
}
