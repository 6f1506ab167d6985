//! The table of contents of one safetensors file, for models and adapters alike.

use std::ops::Range;

use kernels::TensorType;
use safetensors::{Dtype, SafeTensorError, SafeTensors};

/// Bytes of the length that a file begins with.
const LENGTH_BYTES: usize = 8;

/// Why the header of a safetensors file is refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum SafetensorsFormatError {
    #[error("its header takes {found} bytes, and the limit is {limit}")]
    HeaderTooLarge { found: u64, limit: u64 },
    #[error("its header is malformed: {0}")]
    Malformed(#[from] SafeTensorError),
    #[error("tensor `{tensor}` has type {kind:?}; F32, F16 and BF16 are supported")]
    UnsupportedType { tensor: String, kind: Dtype },
}

/// A stored tensor: `range` lies inside the file and has the size that `kind` and `shape` call for.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    pub(crate) kind: TensorType,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
}

impl StoredTensor {
    /// `[rows, cols]`, a vector being one row; `None` for other numbers of dimensions.
    pub(crate) fn matrix_shape(&self) -> Option<[usize; 2]> {
        match *self.shape {
            [cols] => Some([1, cols]),
            [rows, cols] => Some([rows, cols]),
            _ => None,
        }
    }
}

/// The tensors of a file, sorted by name.
///
/// # Errors
/// If the header is beyond `header_limit_bytes`, malformed, does not cover the file exactly, or names a tensor of
/// a type that is not supported.
pub(crate) fn read_contents(
    file: &[u8],
    header_limit_bytes: u64,
) -> Result<Vec<(String, StoredTensor)>, SafetensorsFormatError> {
    let (length, _) = file.split_first_chunk::<LENGTH_BYTES>().ok_or(SafeTensorError::HeaderTooSmall)?;
    let found = u64::from_le_bytes(*length);
    if found > header_limit_bytes {
        return Err(SafetensorsFormatError::HeaderTooLarge { found, limit: header_limit_bytes });
    }
    // Checks that the tensors lie one behind the other from the header to the end of the file.
    let (header_bytes, metadata) = SafeTensors::read_metadata(file)?;
    let start = header_bytes + LENGTH_BYTES;
    let mut contents = Vec::new();
    for (name, info) in metadata.tensors() {
        let (begin, end) = info.data_offsets;
        let kind = tensor_type(info.dtype).ok_or_else(|| SafetensorsFormatError::UnsupportedType {
            tensor: name.clone(),
            kind: info.dtype,
        })?;
        let range = start + begin..start + end;
        contents.push((name, StoredTensor { kind, shape: info.shape.clone(), range }));
    }
    contents.sort_by(|(left, _), (right, _)| left.cmp(right));
    Ok(contents)
}

fn tensor_type(dtype: Dtype) -> Option<TensorType> {
    match dtype {
        Dtype::F32 => Some(TensorType::F32),
        Dtype::F16 => Some(TensorType::F16),
        Dtype::BF16 => Some(TensorType::Bf16),
        _ => None,
    }
}
