//! GGUF files: metadata and tensors in one little-endian file (versions 2 and 3).
//!
//! A file is untrusted input. Everything it says about sizes is checked with checked arithmetic against the bytes
//! there are before anything is allocated for it; after [`GgufFile::open`] every tensor lies inside the file.
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

/// Why a GGUF file could not be read.
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
    /// The file's contents are not what they should be.
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

/// A tensor of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorView<'a> {
    /// Encoding of the bytes in `data`.
    pub kind: TensorType,
    /// Dimensions in the file's order: the first one is the length of a row, contiguous in memory.
    pub dims: &'a [usize],
    /// All rows, one after another.
    pub data: &'a [u8],
}

impl TensorView<'_> {
    /// Elements of a row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.dims.first().copied().unwrap_or(1)
    }

    /// Rows: the product of all dimensions but the first.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.dims.iter().skip(1).product()
    }
}

/// Where a file's bytes are.
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

/// An open GGUF file: its metadata copied out, its tensors checked and left where they are.
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
    /// If it cannot be mapped, or anything in its header is malformed, beyond [`limits`] or outside the file.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let map =
            MappedFile::open(path).map_err(|source| GgufError::Open { path: path.to_path_buf(), source })?;
        Self::read(path, FileBytes::Mapped(map))
    }

    /// Checks a file that is in memory already; `path` is for messages.
    ///
    /// # Errors
    /// If anything in its header is malformed, beyond [`limits`] or outside of `bytes`.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, GgufError> {
        Self::read(path, FileBytes::Owned(bytes))
    }

    fn read(path: &Path, bytes: FileBytes) -> Result<Self, GgufError> {
        let Header { metadata, tensors, bytes: header_bytes } = Header::parse(bytes.as_slice())
            .map_err(|source| GgufError::Format { path: path.to_path_buf(), source })?;
        let by_name = tensors.iter().enumerate().map(|(index, (name, _))| (name.clone(), index)).collect();
        Ok(Self { path: path.to_path_buf(), bytes, metadata, tensors, by_name, header_bytes })
    }

    /// Where the file was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's map; `None` if its bytes were given.
    #[must_use]
    pub fn map(&self) -> Option<&MappedFile> {
        match &self.bytes {
            FileBytes::Mapped(map) => Some(map),
            FileBytes::Owned(_) => None,
        }
    }

    /// Bytes of everything before the tensors' data.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.header_bytes
    }

    /// Everything before the tensors' data.
    pub(crate) fn header(&self) -> &[u8] {
        &self.bytes.as_slice()[..self.header_bytes]
    }

    /// Where in the file a tensor is.
    #[must_use]
    pub fn range(&self, name: &str) -> Option<Range<usize>> {
        Some(self.tensors.get(*self.by_name.get(name)?)?.1.range.clone())
    }

    /// True while a mapped file has the length and modification time it was opened with; see
    /// [`MappedFile::unchanged`].
    #[must_use]
    pub fn unchanged(&self) -> bool {
        match &self.bytes {
            FileBytes::Mapped(map) => map.unchanged(),
            FileBytes::Owned(_) => true,
        }
    }

    /// The tensor called `name`.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let index = *self.by_name.get(name)?;
        Some(self.view(&self.tensors.get(index)?.1))
    }

    /// Gives back the memory that caches a tensor of a mapped file; see [`MappedFile::release`].
    pub fn release(&self, name: &str) {
        if let (FileBytes::Mapped(map), Some(&index)) = (&self.bytes, self.by_name.get(name)) {
            map.release(self.tensors[index].1.range.clone());
        }
    }

    /// All tensors with their names, in the file's order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, TensorView<'_>)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), self.view(info)))
    }

    fn view<'a>(&'a self, info: &'a TensorInfo) -> TensorView<'a> {
        TensorView { kind: info.kind, dims: &info.dims, data: &self.bytes.as_slice()[info.range.clone()] }
    }

    /// The metadata value of `key`.
    #[must_use]
    pub fn metadata(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// All metadata, in no order.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.metadata.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of `key` as `convert` sees it; `None` if the file has no such key.
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

    /// A count or id, stored as an integer of any width.
    ///
    /// # Errors
    /// If the key is there but no integer that fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.typed(key, "an unsigned 32-bit integer", |value| value.as_u64()?.try_into().ok())
    }

    /// A count, stored as an integer of any width.
    ///
    /// # Errors
    /// If the key is there but no integer that fits.
    pub fn usize(&self, key: &str) -> Result<Option<usize>, GgufError> {
        self.typed(key, "a count", |value| value.as_u64()?.try_into().ok())
    }

    /// A number, stored as a float of either width.
    ///
    /// # Errors
    /// If the key is there but no float.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, "a float", Value::as_f32)
    }

    /// A truth value.
    ///
    /// # Errors
    /// If the key is there but no truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a truth value", Value::as_bool)
    }

    /// A text.
    ///
    /// # Errors
    /// If the key is there but no string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A list of texts.
    ///
    /// # Errors
    /// If the key is there but no array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, GgufError> {
        self.typed(key, "an array of strings", |value| value.as_array()?.as_strs())
    }

    /// A list of numbers.
    ///
    /// # Errors
    /// If the key is there but no array of floats.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        self.typed(key, "an array of floats", |value| value.as_array()?.to_f32s())
    }

    /// A list of integers of any width and sign.
    ///
    /// # Errors
    /// If the key is there but no array of integers.
    pub fn i64s(&self, key: &str) -> Result<Option<Vec<i64>>, GgufError> {
        self.typed(key, "an array of integers", |value| value.as_array()?.to_i64s())
    }
}
