//! Adapters as PEFT writes them: a directory that transformers loads, and every other server.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use half::{bf16, f16};
use kernels::TensorType;
use safetensors::{Dtype, SafeTensorError, tensor::TensorView};

/// What PEFT calls an adapter's configuration.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// What it calls its weights.
pub const WEIGHT_FILE: &str = "adapter_model.safetensors";

/// The tensor of a draft adapter that holds the tokens it may guess, `[tokens]`, ascending.
const SHORTLIST: &str = "draft.shortlist";

/// The name of our words in a file of tensors.
pub const METADATA: &str = "holobiont";

/// Why an adapter was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The file system did not take it.
    #[error("{path} cannot be written")]
    Io {
        /// The file or directory.
        path: String,
        /// Cause.
        source: io::Error,
    },
    /// It cannot be encoded.
    #[error("the tensors of the adapter cannot be written")]
    Encode(#[from] SafeTensorError),
}

/// A tensor by its name.
#[derive(Debug)]
pub struct NamedTensor<'a> {
    /// What the file calls it.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its numbers, row after row.
    pub values: &'a [f32],
}

/// Writes an adapter of a configuration and a file of tensors to the directory `path`, which must not exist: beside it first, so
/// that it is there whole or not at all, and on the disk before this returns.
///
/// # Errors
/// It cannot be written.
pub fn write(path: &Path, options: &[u8], weights: &[u8]) -> Result<(), WriteError> {
    let beside = path.with_extension("partial");
    let _ = fs::remove_dir_all(&beside);
    let written = fs::create_dir_all(&beside)
        .and_then(|()| write_file(&beside.join(CONFIG_FILE), options))
        .and_then(|()| write_file(&beside.join(WEIGHT_FILE), weights))
        .and_then(|()| sync(&beside))
        .and_then(|()| fs::rename(&beside, path))
        .and_then(|()| path.parent().map_or(Ok(()), sync));
    written.map_err(|source| {
        // A disk that is full needs the room.
        let _ = fs::remove_dir_all(&beside);
        WriteError::Io { path: path.display().to_string(), source }
    })
}

/// Writes a file and sees that it is on the disk.
///
/// # Errors
/// The system refuses.
pub fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::write(path, bytes)?;
    File::open(path)?.sync_all()
}

/// Sees that a directory's entries are on the disk.
///
/// # Errors
/// The system refuses.
pub fn sync(directory: &Path) -> io::Result<()> {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    File::open(directory)?.sync_all()
}

/// The tensors in one file, of F16, BF16, or else F32, with the shortlist of a draft, if there is one, and words about them. The same
/// numbers give the same bytes.
///
/// # Errors
/// They cannot be encoded.
pub fn serialize(
    tensors: &[NamedTensor<'_>],
    kind: TensorType,
    shortlist: &[u32],
    words: Option<String>,
) -> Result<Vec<u8>, SafeTensorError> {
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|tensor| encode(kind, tensor.values)).collect();
    let mut views = Vec::with_capacity(tensors.len());
    for (NamedTensor { name, shape, .. }, bytes) in tensors.iter().zip(&bytes) {
        views.push((&name[..], TensorView::new(dtype(kind), shape.clone(), bytes)?));
    }
    let tokens: Vec<u8> = shortlist.iter().flat_map(|&token| i64::from(token).to_le_bytes()).collect();
    if !shortlist.is_empty() {
        views.push((SHORTLIST, TensorView::new(Dtype::I64, vec![shortlist.len()], &tokens)?));
    }
    safetensors::serialize(views, words.map(|words| [(METADATA.to_owned(), words)].into()))
}

fn dtype(kind: TensorType) -> Dtype {
    match kind {
        TensorType::F16 => Dtype::F16,
        TensorType::Bf16 => Dtype::BF16,
        _ => Dtype::F32,
    }
}

/// Rounds to nearest, ties to even.
fn encode(kind: TensorType, values: &[f32]) -> Vec<u8> {
    let values = values.iter();
    match kind {
        TensorType::F16 => values.flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        TensorType::Bf16 => values.flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(|value| value.to_le_bytes()).collect(),
    }
}
