//! From stored matrices to an adapter: finite numbers, one hash, one order.

use std::{borrow::Cow, path::Path};

use half::{bf16, f16};
use kernels::TensorType;

use super::{Adapter, AdapterError, LoraModule};
use crate::{generation::GenerationHasher, source::Target};

/// A matrix as a file stores it, its shape checked.
pub(super) struct StoredMatrix<'a> {
    /// What its file calls it.
    pub(super) name: String,
    /// F32, F16 or BF16.
    pub(super) kind: TensorType,
    /// Row after row.
    pub(super) bytes: Cow<'a, [u8]>,
}

/// An adapted linear layer as a file stores it.
pub(super) struct StoredModule<'a> {
    pub(super) layer: usize,
    pub(super) target: Target,
    pub(super) rank: usize,
    pub(super) scale: f32,
    /// `[rank, in]`.
    pub(super) a: StoredMatrix<'a>,
    /// `[out, rank]`.
    pub(super) b: StoredMatrix<'a>,
}

/// Decodes, checks and hashes the modules of the adapter in `path`.
pub(super) fn assemble(
    path: &Path,
    mut stored: Vec<StoredModule<'_>>,
    base_model: Option<String>,
) -> Result<Adapter, AdapterError> {
    if stored.is_empty() {
        return Err(AdapterError::Empty { path: path.to_path_buf() });
    }
    stored.sort_by_key(|module| (module.layer, module.target));
    let mut hasher = GenerationHasher::new(stored.len());
    let mut modules = Vec::with_capacity(stored.len());
    let mut stored_in_16_bits = true;
    for StoredModule { layer, target, rank, scale, a, b } in stored {
        hasher.module(layer, target, rank, scale);
        hasher.matrix(a.kind, &a.bytes);
        hasher.matrix(b.kind, &b.bytes);
        stored_in_16_bits &= a.kind != TensorType::F32 && b.kind != TensorType::F32;
        modules.push(LoraModule { layer, target, rank, scale, a: decode(path, &a)?, b: decode(path, &b)? });
    }
    Ok(Adapter { generation: hasher.finish(), modules, base_model, stored_in_16_bits })
}

/// The numbers of a matrix, all of them finite.
fn decode(path: &Path, matrix: &StoredMatrix<'_>) -> Result<Vec<f32>, AdapterError> {
    let (words, _) = matrix.bytes.as_chunks();
    let (halves, _) = matrix.bytes.as_chunks();
    let numbers: Vec<f32> = match matrix.kind {
        TensorType::F32 => words.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        TensorType::F16 => halves.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect(),
        TensorType::Bf16 => halves.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect(),
        _ => unreachable!("adapters of other types are refused before they are decoded"),
    };
    match numbers.iter().position(|number| !number.is_finite()) {
        None => Ok(numbers),
        Some(index) => Err(AdapterError::NotFinite {
            path: path.to_path_buf(),
            tensor: matrix.name.clone(),
            index,
            value: numbers[index],
        }),
    }
}
