//! Read-only maps of regular files that other processes may write.
//!
//! This module is the only place where a file is mapped, so the crates above need no `unsafe`.

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    ops::{Deref, Range},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use rustix::fs::OFlags;

/// Opens a regular file for reading.
///
/// # Errors
/// Returns the error of opening, or `InvalidInput` for any but a regular file. A pipe does not block.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    // The check uses the opened file, because the path may name another file by now.
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Regular file mapped read-only, in full.
///
/// A process with write access can still change or shorten the file. Changed bytes are read as they are, and
/// users of the map check each value that they take. Access to a page behind a new end kills the process with
/// SIGBUS. Model files are therefore replaced by renaming a new file over them, never rewritten, and
/// [`MappedFile::unchanged`] checks that rule.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    map: memmap2::Mmap,
}

/// Length and modification time, which distinguish states of a file.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self { bytes: metadata.len(), modified: metadata.modified().ok() }
    }
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// Returns the error of opening or mapping, or `InvalidInput` if the path is no regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = open_regular(path)?;
        let stamp = Stamp::of(&file.metadata()?);
        // SAFETY: the map is private to this value and read-only. It is unmapped after all borrows have
        // ended, because `Deref` ties every slice to `self`. Other processes may write the file.
        // JUSTIFICATION: the bytes are only read as plain integers, whose every bit pattern is valid, and
        // counts are checked after they are copied. A shortened file ends the process (SIGBUS) but never
        // gives it wrong memory.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self { path: path.to_path_buf(), file, stamp, map })
    }

    /// Returns the path at which the file was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the mapped file, even if its path names another file by now.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Releases the page cache of `range`, for bytes that were copied and are not needed soon. A later access
    /// reads them from the file again. The call is advice; a system may ignore it.
    pub fn release(&self, range: Range<usize>) {
        if range.end > self.map.len() || range.is_empty() {
            return;
        }
        // SAFETY: the map is read-only and backed by the file, so a dropped page is read from the file again
        // at its next access. No value behind a live `&[u8]` changes unless the file was rewritten, which is
        // no different from rewriting it under `open`. The range lies inside the map (checked above).
        let advised = unsafe {
            self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
        };
        drop(advised);
    }

    /// True while the mapped file has the length and the modification time that it had at opening.
    #[must_use]
    pub fn unchanged(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| Stamp::of(&metadata) == self.stamp)
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temporary(name: &str, bytes: &[u8]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("mapped-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn a_mapped_file_reads_as_its_bytes() {
        let path = temporary("bytes", b"weights");
        let map = MappedFile::open(&path).unwrap();
        assert_eq!(&*map, b"weights");
        assert_eq!(map.path(), path);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_rewritten_file_is_noticed_and_a_replaced_one_is_not_torn() {
        let path = temporary("rewritten", b"weights");
        let map = MappedFile::open(&path).unwrap();
        assert!(map.unchanged());
        let other = temporary("other", b"other weights");
        std::fs::rename(&other, &path).unwrap();
        assert!(map.unchanged(), "the mapped file still is the one that was opened");
        assert_eq!(&*map, b"weights");

        let map = MappedFile::open(&path).unwrap();
        std::fs::write(&path, b"other weights and more").unwrap();
        assert!(!map.unchanged());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn released_bytes_can_be_read_again() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        let path = temporary("released", &bytes);
        let map = MappedFile::open(&path).unwrap();
        map.release(5_000..90_001);
        map.release(0..map.len());
        map.release(map.len() + 1..map.len() + 2);
        map.release(7..7);
        assert_eq!(&*map, bytes);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_directory_and_a_device_are_refused() {
        for path in ["/", "/dev/zero"] {
            assert!(MappedFile::open(Path::new(path)).is_err(), "{path} was mapped");
        }
    }
}
