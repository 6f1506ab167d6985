//! Writes adapters in PEFT's format: directories that transformers and other servers load.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use half::{bf16, f16};
use kernels::TensorType;
use safetensors::{Dtype, SafeTensorError, tensor::TensorView};

/// PEFT's name of the configuration file.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// PEFT's name of the weight file.
pub const WEIGHT_FILE: &str = "adapter_model.safetensors";

/// Tensor of a draft adapter with the tokens that it can predict, `[tokens]`, ascending.
const SHORTLIST: &str = "draft.shortlist";

/// Key of this program's entry in a safetensors file's metadata.
pub const METADATA: &str = "holobiont";

/// Reasons why an adapter was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// A file operation failed.
    #[error("cannot write {path}")]
    Io {
        /// Path of the file or directory.
        path: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The tensors cannot be encoded.
    #[error("cannot write the tensors of the adapter")]
    Encode(#[from] SafeTensorError),
}

/// A tensor to write, with its name.
#[derive(Debug)]
pub struct NamedTensor<'a> {
    /// Name of the tensor in the file.
    pub name: String,
    /// Dimensions of the tensor.
    pub shape: Vec<usize>,
    /// Values in row-major order.
    pub values: &'a [f32],
}

/// Writes configuration and weights of an adapter to the directory `path`, which must not exist. The data is
/// written and synced beside `path` and then renamed, so a crash leaves all of it or nothing.
///
/// # Errors
/// A file operation failed.
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
        // A full disk needs the space.
        let _ = fs::remove_dir_all(&beside);
        WriteError::Io { path: path.display().to_string(), source }
    })
}

/// Writes a file and syncs it to the disk.
///
/// # Errors
/// The operating system reports an error.
pub fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::write(path, bytes)?;
    File::open(path)?.sync_all()
}

/// Syncs a directory's entries to the disk.
///
/// # Errors
/// The operating system reports an error.
pub fn sync(directory: &Path) -> io::Result<()> {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    File::open(directory)?.sync_all()
}

/// Serializes tensors as F16, BF16, or else F32, with shortlist and metadata `words`, deterministically.
///
/// # Errors
/// The tensors cannot be encoded.
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

/// Encodes values with rounding to nearest, ties to even.
fn encode(kind: TensorType, values: &[f32]) -> Vec<u8> {
    match kind {
        TensorType::F16 => fixed_width(values, |value| f16::from_f32(value).to_le_bytes()),
        TensorType::Bf16 => fixed_width(values, |value| bf16::from_f32(value).to_le_bytes()),
        _ => fixed_width(values, f32::to_le_bytes),
    }
}

/// Encodes values of `N` bytes each. The compiler vectorises this loop, but not a `flat_map` over arrays.
fn fixed_width<const N: usize>(values: &[f32], encode: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    let mut bytes = vec![0; N * values.len()];
    for (out, &value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *out = encode(value);
    }
    bytes
}
