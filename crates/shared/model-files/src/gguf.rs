//! GGUF files: metadata and tensors in one little-endian file (versions 2 and 3).
//!
//! A file is untrusted input. Every size that it states is checked against the file's bytes, with checked
//! arithmetic, before memory is allocated for it. After [`GgufFile::open`] every tensor lies inside the file.
//!
//! ```text
//! magic "GGUF" | version u32 | tensors u64 | entries u64
//! entries x    { key string | kind u32 | value }
//! tensors x    { name string | dimensions u32 | dimensions x u64 | type u32 | offset u64 }
//! padding to `general.alignment` | tensor data, each at a multiple of the alignment
//! ```

mod header;
pub mod limits;
mod value;

use std::{
    collections::HashMap,
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
};

use shmproto::file::MappedFile;
use types::TensorType;

pub use header::FormatError;
pub use value::{Array, Value, ValueKind};

use header::{Header, TensorInfo};

/// Error of opening a GGUF file or reading its metadata.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file could not be opened or mapped.
    #[error("cannot open {}: {source}; give the path of a readable GGUF file", path.display())]
    Open {
        /// Path of the file concerned.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file's contents are malformed.
    #[error("{} is not a usable GGUF file: {source}; fetch the file again", path.display())]
    Format {
        /// Path of the file concerned.
        path: PathBuf,
        /// Defect that was found in the file.
        source: FormatError,
    },
    /// A metadata value has another type than its key calls for.
    #[error("{}: metadata `{key}` is {found} where {expected} is expected; convert the model again", path.display())]
    WrongType {
        /// Path of the file concerned.
        path: PathBuf,
        /// Key of the metadata value.
        key: String,
        /// Type that the reader needs.
        expected: &'static str,
        /// Type that the file holds.
        found: String,
    },
}

/// Tensor of a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorView<'a> {
    /// Encoding of the bytes in `data`.
    pub kind: TensorType,
    /// Dimensions in the file's order: the first one is the length of a row, contiguous in memory.
    pub dims: &'a [usize],
    /// Bytes of all rows, one after another.
    pub data: &'a [u8],
}

impl TensorView<'_> {
    /// Returns the number of elements per row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.dims.first().copied().unwrap_or(1)
    }

    /// Returns the number of rows: the product of all dimensions but the first.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.dims.iter().skip(1).product()
    }
}

/// Storage of a file's bytes.
enum FileBytes {
    Mapped(MappedFile),
    Owned(Vec<u8>),
}

impl FileBytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

/// Open GGUF file with copied metadata and checked tensors, which stay where they are.
pub struct GgufFile {
    path: PathBuf,
    bytes: FileBytes,
    metadata: HashMap<String, Value>,
    tensors: Vec<(String, TensorInfo)>,
    by_name: HashMap<String, usize>,
    header_bytes: usize,
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufFile")
            .field("path", &self.path)
            .field("entries", &self.metadata.len())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

impl GgufFile {
    /// Maps and checks the file at `path`.
    ///
    /// # Errors
    /// Fails if the file cannot be mapped, or if its header is malformed, beyond [`limits`] or outside the
    /// file.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let map =
            MappedFile::open(path).map_err(|source| GgufError::Open { path: path.to_path_buf(), source })?;
        Self::read(path, FileBytes::Mapped(map))
    }

    /// Checks a file whose bytes are in memory; `path` is used in error messages only.
    ///
    /// # Errors
    /// Fails if the header is malformed, beyond [`limits`] or outside of `bytes`.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, GgufError> {
        Self::read(path, FileBytes::Owned(bytes))
    }

    fn read(path: &Path, bytes: FileBytes) -> Result<Self, GgufError> {
        let Header { metadata, tensors, bytes: header_bytes } = Header::parse(bytes.as_slice())
            .map_err(|source| GgufError::Format { path: path.to_path_buf(), source })?;
        let by_name = tensors.iter().enumerate().map(|(index, (name, _))| (name.clone(), index)).collect();
        Ok(Self { path: path.to_path_buf(), bytes, metadata, tensors, by_name, header_bytes })
    }

    /// Returns the path with which the file was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the memory map of the file; `None` if the bytes were given.
    #[must_use]
    pub fn map(&self) -> Option<&MappedFile> {
        match &self.bytes {
            FileBytes::Mapped(map) => Some(map),
            FileBytes::Owned(_) => None,
        }
    }

    /// Returns the number of bytes before the tensor data.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.header_bytes
    }

    /// Returns the bytes before the tensor data.
    pub(crate) fn header(&self) -> &[u8] {
        &self.bytes.as_slice()[..self.header_bytes]
    }

    /// Returns the tensor's byte range in the file.
    #[must_use]
    pub fn range(&self, name: &str) -> Option<Range<usize>> {
        Some(self.tensors.get(*self.by_name.get(name)?)?.1.range.clone())
    }

    /// True while a mapped file has the length and modification time that it had when it was opened; see
    /// [`MappedFile::unchanged`].
    #[must_use]
    pub fn unchanged(&self) -> bool {
        match &self.bytes {
            FileBytes::Mapped(map) => map.unchanged(),
            FileBytes::Owned(_) => true,
        }
    }

    /// Returns the tensor called `name`.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let index = *self.by_name.get(name)?;
        Some(self.view(&self.tensors.get(index)?.1))
    }

    /// Releases the memory that caches a tensor of a mapped file; see [`MappedFile::release`].
    pub fn release(&self, name: &str) {
        if let (FileBytes::Mapped(map), Some(&index)) = (&self.bytes, self.by_name.get(name)) {
            map.release(self.tensors[index].1.range.clone());
        }
    }

    /// Returns all tensors with their names, in the file's order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, TensorView<'_>)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), self.view(info)))
    }

    fn view<'a>(&'a self, info: &'a TensorInfo) -> TensorView<'a> {
        TensorView { kind: info.kind, dims: &info.dims, data: &self.bytes.as_slice()[info.range.clone()] }
    }

    /// Returns the metadata value of `key`.
    #[must_use]
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Returns all metadata, in no particular order.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.metadata.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Converts the value of `key` with `convert`; `None` if the file has no such key.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.metadata.get(key) else {
            return Ok(None);
        };
        convert(value).map(Some).ok_or_else(|| GgufError::WrongType {
            path: self.path.clone(),
            key: key.to_owned(),
            expected,
            found: value.summary(),
        })
    }

    /// Returns a count or id, stored as an integer of any width.
    ///
    /// # Errors
    /// Fails if the value is not an integer from 0 to 2^32 - 1.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.typed(key, "an unsigned 32-bit integer", |value| value.as_u64()?.try_into().ok())
    }

    /// Returns a count, stored as an integer of any width.
    ///
    /// # Errors
    /// Fails if the value is not an integer from 0 to `usize::MAX`.
    pub fn usize(&self, key: &str) -> Result<Option<usize>, GgufError> {
        self.typed(key, "a count", |value| value.as_u64()?.try_into().ok())
    }

    /// Returns a number, stored as a float of either width.
    ///
    /// # Errors
    /// Fails if the value is not a float.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, "a float", Value::as_f32)
    }

    /// Returns a boolean value.
    ///
    /// # Errors
    /// Fails if the value is not a boolean.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a boolean", Value::as_bool)
    }

    /// Returns a string value.
    ///
    /// # Errors
    /// Fails if the value is not a string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// Returns a list of strings.
    ///
    /// # Errors
    /// Fails if the value is not an array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, GgufError> {
        self.typed(key, "an array of strings", |value| value.as_array()?.as_strs())
    }

    /// Returns a list of floats.
    ///
    /// # Errors
    /// Fails if the value is not an array of floats.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        self.typed(key, "an array of floats", |value| value.as_array()?.to_f32s())
    }

    /// Returns a list of integers of any width and sign.
    ///
    /// # Errors
    /// Fails if the value is not an array of integers.
    pub fn i64s(&self, key: &str) -> Result<Option<Vec<i64>>, GgufError> {
        self.typed(key, "an array of integers", |value| value.as_array()?.to_i64s())
    }
}
