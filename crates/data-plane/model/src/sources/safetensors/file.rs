//! Table of contents of a safetensors file, for models and adapters.

use std::{collections::HashSet, fmt, ops::Range};

use kernels::TensorType;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, Visitor},
};

use model_files::bounded_json;

/// Bytes of the header length at the beginning of a file.
const LENGTH_BYTES: usize = 8;

/// Reasons for refusing the header of a safetensors file.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum SafetensorsFormatError {
    #[error("its header has {found} bytes, and the limit is {limit}")]
    HeaderTooLarge { found: u64, limit: u64 },
    #[error("its header is malformed: {0}")]
    Malformed(#[from] SafeTensorError),
    #[error("its header is malformed: {0}")]
    Header(#[from] serde_json::Error),
    #[error("tensor `{tensor}` has type {kind:?}; F32, F16 and BF16 are supported")]
    UnsupportedType { tensor: String, kind: Dtype },
}

/// A stored tensor; `range` lies inside the file and has the size required by `kind` and `shape`.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    pub(crate) kind: TensorType,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
}

impl StoredTensor {
    /// Returns `[rows, cols]`, with one row for a vector, or `None` for other numbers of dimensions.
    pub(crate) fn matrix_shape(&self) -> Option<[usize; 2]> {
        match *self.shape {
            [cols] => Some([1, cols]),
            [rows, cols] => Some([rows, cols]),
            _ => None,
        }
    }
}

/// A stored tensor of an element type without arithmetic.
#[derive(Debug, Clone)]
pub(crate) struct OtherTensor {
    pub(crate) name: String,
    pub(crate) kind: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
}

impl From<OtherTensor> for SafetensorsFormatError {
    fn from(other: OtherTensor) -> Self {
        Self::UnsupportedType { tensor: other.name, kind: other.kind }
    }
}

/// Limits of a file's header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeaderLimits {
    pub(crate) bytes: u64,
    /// Maximum signs that begin or separate values; a tensor has about twelve.
    pub(crate) signs: usize,
}

/// The tensors of a file, by name in ascending order.
#[derive(Debug)]
pub(crate) struct TensorTable {
    pub(crate) tensors: Vec<(String, StoredTensor)>,
    pub(crate) others: Vec<OtherTensor>,
    /// Offset of the first tensor's data.
    pub(crate) header_bytes: usize,
}

/// Reads the tensors of a file, sorted by name, with unsupported element types apart.
///
/// # Errors
/// The header exceeds `limits`, is malformed, or does not cover the file exactly.
pub(crate) fn read_all_contents(
    file: &[u8],
    limits: HeaderLimits,
) -> Result<TensorTable, SafetensorsFormatError> {
    let (length, _) = file.split_first_chunk::<LENGTH_BYTES>().ok_or(SafeTensorError::HeaderTooSmall)?;
    let found = u64::from_le_bytes(*length);
    if found > limits.bytes {
        return Err(SafetensorsFormatError::HeaderTooLarge { found, limit: limits.bytes });
    }
    check_names(file, found, limits.signs)?;
    // The call checks that the tensors are contiguous from the header to the end of the file.
    let (header_bytes, metadata) = SafeTensors::read_metadata(file)?;
    let start = header_bytes + LENGTH_BYTES;
    let (mut tensors, mut others) = (Vec::new(), Vec::new());
    for (name, info) in metadata.tensors() {
        let (begin, end) = info.data_offsets;
        let (shape, range) = (info.shape.clone(), start + begin..start + end);
        match tensor_type(info.dtype) {
            Some(kind) => tensors.push((name, StoredTensor { kind, shape, range })),
            None => others.push(OtherTensor { name, kind: info.dtype, shape, range }),
        }
    }
    tensors.sort_by(|(left, _), (right, _)| left.cmp(right));
    others.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(TensorTable { tensors, others, header_bytes: start })
}

/// Refuses a header that would grow in memory, or that has a name twice. Readers that use the first or the
/// last entry of a name would otherwise load different models from one file.
fn check_names(file: &[u8], header_bytes: u64, max_signs: usize) -> Result<(), SafetensorsFormatError> {
    let end = usize::try_from(header_bytes).ok().and_then(|bytes| bytes.checked_add(LENGTH_BYTES));
    let Some(header) = end.and_then(|end| file.get(LENGTH_BYTES..end)) else {
        return Err(SafeTensorError::InvalidHeaderLength.into());
    };
    bounded_json::check_size(header, max_signs)?;
    serde_json::from_slice::<UniqueNames>(header)?;
    Ok(())
}

/// A map with unique keys, whose values are ignored.
struct UniqueNames;

impl<'de> Deserialize<'de> for UniqueNames {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Self)
    }
}

impl<'de> Visitor<'de> for UniqueNames {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut names = HashSet::new();
        while let Some((name, IgnoredAny)) = map.next_entry::<String, _>()? {
            if names.contains(&name) {
                return Err(A::Error::custom(format_args!("tensor `{}` appears twice", name.escape_debug())));
            }
            names.insert(name);
        }
        Ok(self)
    }
}

fn tensor_type(dtype: Dtype) -> Option<TensorType> {
    match dtype {
        Dtype::F32 => Some(TensorType::F32),
        Dtype::F16 => Some(TensorType::F16),
        Dtype::BF16 => Some(TensorType::Bf16),
        _ => None,
    }
}
