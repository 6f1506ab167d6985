//! Builds adapters from stored matrices: checks for finite values, hashes the contents, and sorts the layers.

use std::{borrow::Cow, path::Path, sync::Arc};

use half::{bf16, f16, slice::HalfFloatSliceExt as _};
use kernels::TensorType;
use types::AdapterVersion;

use super::{
    error::AdapterError,
    hasher::VersionHasher,
    invocation::Invocation,
    method::{
        Adapter, AnyAdapter, BiasedAdapter, DoraAdapter, DraftAdapter, DraftShape, LoraModule, MethodWeights,
        ScaleVector, ScaledSide, Scales,
    },
    virtual_tokens::{Prefix, PromptEmbeddings},
};
use crate::shape::source::Target;

/// A matrix as stored in a file, with a checked shape.
#[derive(Clone)]
pub(super) struct StoredMatrix<'a> {
    pub(super) name: String,
    /// F32, F16 or BF16.
    pub(super) kind: TensorType,
    /// Elements in row-major order.
    pub(super) bytes: Cow<'a, [u8]>,
}

impl StoredMatrix<'_> {
    /// Encodes numbers in 32 bits.
    pub(super) fn of_numbers(name: String, values: &[f32]) -> StoredMatrix<'static> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        StoredMatrix { name, kind: TensorType::F32, bytes: bytes.into() }
    }

    /// Returns the matrix of `rows` rows with the even rows before the odd ones.
    pub(super) fn even_rows_first(self, rows: usize) -> StoredMatrix<'static> {
        let row_bytes = (self.bytes.len() / rows).max(1);
        let half = |first| self.bytes.chunks_exact(row_bytes).skip(first).step_by(2).flatten();
        let bytes: Vec<u8> = half(0).chain(half(1)).copied().collect();
        StoredMatrix { name: self.name, kind: self.kind, bytes: bytes.into() }
    }
}

/// An offset of a linear layer's outputs.
pub(super) struct StoredBias {
    pub(super) layer: usize,
    pub(super) target: Target,
    pub(super) values: Vec<f32>,
}

pub(super) struct StoredPrompt<'a> {
    pub(super) tokens: usize,
    pub(super) is_scaled: bool,
    /// Matrix of shape `[tokens, hidden]`.
    pub(super) values: StoredMatrix<'a>,
}

pub(super) struct StoredModule<'a> {
    pub(super) layer: usize,
    pub(super) target: Target,
    pub(super) rank: usize,
    pub(super) scale: f32,
    /// Matrix of shape `[rank, in]`.
    pub(super) a: StoredMatrix<'a>,
    /// Matrix of shape `[out, rank]`.
    pub(super) b: StoredMatrix<'a>,
}

/// Factors of a linear layer in any base, as stored in a file.
pub(super) struct StoredFactors<'a> {
    pub(super) rank: usize,
    pub(super) scale: f32,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// Matrix of shape `[rank, in]`.
    pub(super) a: StoredMatrix<'a>,
    /// Matrix of shape `[out, rank]`.
    pub(super) b: StoredMatrix<'a>,
    /// Magnitude of a DoRA, shape `[out]`.
    pub(super) magnitude: Option<StoredMatrix<'a>>,
}

pub(super) struct StoredVector<'a> {
    pub(super) layer: usize,
    pub(super) target: Target,
    pub(super) side: ScaledSide,
    pub(super) values: StoredMatrix<'a>,
}

pub(super) struct StoredPrefix<'a> {
    pub(super) tokens: usize,
    pub(super) layers: usize,
    /// Elements of all key heads of a token.
    pub(super) width: usize,
    /// Matrix of shape `[tokens, layers * 2 * width]`.
    pub(super) values: StoredMatrix<'a>,
}

pub(super) enum StoredMethod<'a> {
    Lora(Vec<StoredModule<'a>>),
    Activated(Vec<StoredModule<'a>>, Invocation),
    Dora(Vec<(StoredModule<'a>, StoredMatrix<'a>)>),
    Ia3(Vec<StoredVector<'a>>),
    Prefix(StoredPrefix<'a>),
    Prompt(StoredPrompt<'a>),
    Biased(Vec<StoredModule<'a>>, Vec<StoredBias>),
}

impl StoredMethod<'_> {
    pub(super) fn places(&self) -> Vec<(usize, Target)> {
        let place = |module: &StoredModule<'_>| (module.layer, module.target);
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) | Self::Biased(modules, _) => {
                modules.iter().map(place).collect()
            }
            Self::Dora(modules) => modules.iter().map(|(module, _)| place(module)).collect(),
            Self::Ia3(_) | Self::Prefix(_) | Self::Prompt(_) => Vec::new(),
        }
    }
}

/// Decodes, checks and hashes the adapter in `path`.
pub(super) fn assemble(
    path: &Path,
    stored: StoredMethod<'_>,
    base_model: Option<String>,
) -> Result<AnyAdapter, AdapterError> {
    let (method, generation, stored_in_16_bits) = match stored {
        StoredMethod::Lora(modules) => {
            let hasher = VersionHasher::lora(modules.len());
            assemble_lora(path, hasher, modules)?
        }
        StoredMethod::Activated(modules, invocation) => assemble_activated(path, modules, invocation)?,
        StoredMethod::Dora(modules) => {
            return assemble_dora(path, modules, base_model).map(AnyAdapter::Decomposed);
        }
        StoredMethod::Ia3(vectors) => assemble_ia3(path, vectors)?,
        StoredMethod::Prefix(prefix) => assemble_prefix(path, &prefix)?,
        StoredMethod::Prompt(prompt) => assemble_prompt(path, &prompt)?,
        StoredMethod::Biased(modules, biases) => {
            return assemble_biased(path, modules, biases, base_model).map(AnyAdapter::Biased);
        }
    };
    Ok(Adapter { generation, method, base_model, stored_in_16_bits }.into())
}

fn assemble_activated(
    path: &Path,
    stored: Vec<StoredModule<'_>>,
    invocation: Invocation,
) -> Result<Assembled, AdapterError> {
    let hasher = VersionHasher::activated(stored.len(), invocation.tokens());
    match assemble_lora(path, hasher, stored)? {
        (MethodWeights::Lora(modules), generation, in_16_bits) => {
            Ok((MethodWeights::Activated(modules, invocation), generation, in_16_bits))
        }
        assembled => Ok(assembled),
    }
}

fn assemble_dora(
    path: &Path,
    mut stored: Vec<(StoredModule<'_>, StoredMatrix<'_>)>,
    base_model: Option<String>,
) -> Result<DoraAdapter, AdapterError> {
    stored.sort_by_key(|(module, _)| (module.layer, module.target));
    let mut hasher = VersionHasher::dora(stored.len());
    let (mut modules, mut magnitudes) = (Vec::new(), Vec::new());
    for (module, magnitude) in stored {
        hasher.matrix(magnitude.kind, &magnitude.bytes);
        magnitudes.push(decode(path, &magnitude)?);
        modules.push(module);
    }
    let (method, generation, stored_in_16_bits) = assemble_lora(path, hasher, modules)?;
    Ok(DoraAdapter { adapter: Adapter { generation, method, base_model, stored_in_16_bits }, magnitudes })
}

pub(super) fn assemble_draft(
    path: &Path,
    shape: DraftShape,
    modules: Vec<StoredModule<'_>>,
    base_model: Option<String>,
) -> Result<DraftAdapter, AdapterError> {
    let hasher = VersionHasher::draft(modules.len(), shape.layers, shape.shortlist.as_deref());
    let (method, generation, stored_in_16_bits) = assemble_lora(path, hasher, modules)?;
    Ok(DraftAdapter { shape, adapter: Adapter { generation, method, base_model, stored_in_16_bits } })
}

/// Weights, version hash, and whether 16 bits hold all values.
pub(super) type Assembled = (MethodWeights, AdapterVersion, bool);

fn assemble_lora(
    path: &Path,
    hasher: VersionHasher,
    stored: Vec<StoredModule<'_>>,
) -> Result<Assembled, AdapterError> {
    if stored.is_empty() {
        return Err(AdapterError::Empty { path: path.to_path_buf() });
    }
    assemble_modules(path, hasher, stored)
}

/// Decodes, checks and hashes the layers of a LoRA; the list may be empty.
pub(super) fn assemble_modules(
    path: &Path,
    mut hasher: VersionHasher,
    mut stored: Vec<StoredModule<'_>>,
) -> Result<Assembled, AdapterError> {
    stored.sort_by_key(|module| (module.layer, module.target));
    let mut modules = Vec::with_capacity(stored.len());
    let mut in_16_bits = true;
    for StoredModule { layer, target, rank, scale, a, b } in stored {
        hasher.module(layer, target, rank, scale);
        hasher.matrix(a.kind, &a.bytes);
        hasher.matrix(b.kind, &b.bytes);
        in_16_bits &= a.kind != TensorType::F32 && b.kind != TensorType::F32;
        modules.push(LoraModule { layer, target, rank, scale, a: decode(path, &a)?, b: decode(path, &b)? });
    }
    Ok((MethodWeights::Lora(modules), hasher.finish(), in_16_bits))
}

fn assemble_ia3(path: &Path, mut stored: Vec<StoredVector<'_>>) -> Result<Assembled, AdapterError> {
    if stored.is_empty() {
        return Err(AdapterError::Empty { path: path.to_path_buf() });
    }
    stored.sort_by_key(|vector| (vector.layer, vector.target));
    let mut hasher = VersionHasher::ia3(stored.len());
    let mut vectors = Vec::with_capacity(stored.len());
    let mut in_16_bits = true;
    for StoredVector { layer, target, side, values } in stored {
        hasher.vector(layer, target, side);
        hasher.matrix(values.kind, &values.bytes);
        in_16_bits &= values.kind != TensorType::F32;
        vectors.push(ScaleVector { layer, target, side, values: decode(path, &values)? });
    }
    Ok((MethodWeights::Ia3(Arc::new(Scales::new(vectors))), hasher.finish(), in_16_bits))
}

fn assemble_prefix(path: &Path, stored: &StoredPrefix<'_>) -> Result<Assembled, AdapterError> {
    let &StoredPrefix { tokens, layers, width, ref values } = stored;
    let mut hasher = VersionHasher::prefix(tokens);
    hasher.matrix(values.kind, &values.bytes);
    let prefix = Prefix { tokens, layers, width, values: decode(path, values)? };
    Ok((MethodWeights::Prefix(Arc::new(prefix)), hasher.finish(), values.kind != TensorType::F32))
}

fn assemble_prompt(path: &Path, stored: &StoredPrompt<'_>) -> Result<Assembled, AdapterError> {
    let &StoredPrompt { tokens, is_scaled, ref values } = stored;
    let mut hasher = VersionHasher::prompt(tokens, is_scaled);
    hasher.matrix(values.kind, &values.bytes);
    let prompt = PromptEmbeddings { tokens, is_scaled, values: decode(path, values)? };
    Ok((MethodWeights::Prompt(Arc::new(prompt)), hasher.finish(), values.kind != TensorType::F32))
}

fn assemble_biased(
    path: &Path,
    modules: Vec<StoredModule<'_>>,
    mut biases: Vec<StoredBias>,
    base_model: Option<String>,
) -> Result<BiasedAdapter, AdapterError> {
    if biases.is_empty() {
        return Err(AdapterError::Empty { path: path.to_path_buf() });
    }
    biases.sort_by_key(|bias| (bias.layer, bias.target));
    let each = biases.iter().map(|bias| (bias.layer, bias.target, &bias.values[..]));
    let hasher = VersionHasher::biased(each, modules.len());
    let (method, generation, _) = assemble_modules(path, hasher, modules)?;
    let offsets = biases.into_iter().map(|bias| ((bias.layer, bias.target), bias.values)).collect();
    let adapter = Adapter { generation, method, base_model, stored_in_16_bits: false };
    Ok(BiasedAdapter { adapter, biases: Scales::new(Vec::new()).with_offsets(offsets) })
}

/// Returns the values of a matrix after a check that all are finite.
pub(super) fn decode(path: &Path, matrix: &StoredMatrix<'_>) -> Result<Vec<f32>, AdapterError> {
    let numbers = numbers(matrix.kind, &matrix.bytes);
    check_finite(path, matrix, &numbers, 0)?;
    Ok(numbers)
}

/// Checks that all values of a matrix with rows of `width` values are finite. The check decodes one row at a
/// time, because a decoded copy would take as much memory again, or twice.
pub(super) fn check_rows(path: &Path, matrix: &StoredMatrix<'_>, width: usize) -> Result<(), AdapterError> {
    let row_bytes = matrix.kind.row_bytes(width).unwrap_or(0).max(1);
    let mut rows = matrix.bytes.chunks(row_bytes).enumerate();
    rows.try_for_each(|(row, bytes)| check_finite(path, matrix, &numbers(matrix.kind, bytes), row * width))
}

fn numbers(kind: TensorType, bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks();
    let (halves, _) = bytes.as_chunks();
    match kind {
        TensorType::F32 => words.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        TensorType::F16 => half_numbers(halves),
        TensorType::Bf16 => halves.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect(),
        _ => unreachable!("adapters of other types are refused before they are decoded"),
    }
}

/// Converts halves in groups, because a processor converts eight at once.
fn half_numbers(halves: &[[u8; 2]]) -> Vec<f32> {
    const GROUP: usize = 256;
    let mut numbers = vec![0.0; halves.len()];
    for (to, from) in numbers.chunks_mut(GROUP).zip(halves.chunks(GROUP)) {
        let mut group = [f16::ZERO; GROUP];
        group.iter_mut().zip(from).for_each(|(half, &bytes)| *half = f16::from_le_bytes(bytes));
        group[..from.len()].convert_to_f32_slice(to);
    }
    numbers
}

/// Checks that `numbers` are finite; `first` is the index of their first element in the matrix.
fn check_finite(
    path: &Path,
    matrix: &StoredMatrix<'_>,
    numbers: &[f32],
    first: usize,
) -> Result<(), AdapterError> {
    match numbers.iter().position(|number| !number.is_finite()) {
        None => Ok(()),
        Some(at) => Err(AdapterError::NotFinite {
            path: path.to_path_buf(),
            tensor: matrix.name.clone(),
            index: first + at,
            value: numbers[at],
        }),
    }
}
