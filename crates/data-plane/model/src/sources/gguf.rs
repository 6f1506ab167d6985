//! A model in a GGUF file: `llama` (Llama 2 and 3, Mistral, Mixtral, SmolLM2), or another family by name.
//!
//! # Layout
//!
//! - this file: the model and its tensors.
//! - `metadata`: reads the model's shape.
//! - `names`: names of tensors in GGUF files.

mod metadata;
mod names;

use std::{
    borrow::Cow,
    collections::HashSet,
    path::{Path, PathBuf},
};

use kernels::TensorType;
use model_files::gguf::{GgufError, GgufFile, TensorView};

pub(crate) use self::names::{fused_name, linear_name, tensor_name};

use self::{metadata::GgufMetadata, names::place};
use crate::{
    shape::{
        config::ModelConfig,
        layout::{self, LayoutError, ModelConfigError, layer_targets},
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::{family::Family, norms::divided_norm},
};

/// Tensor with a divisor for each rotary frequency, if present.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Divisors of longrope for sequences within the original context, and for longer ones, which are not used.
pub(crate) const ROPE_SHORT_FACTORS: &str = "rope_factors_short.weight";
const ROPE_LONG_FACTORS: &str = "rope_factors_long.weight";

/// Reasons why a GGUF file cannot be run as a model.
#[derive(Debug, thiserror::Error)]
pub enum GgufSourceError {
    /// The file itself is broken.
    #[error(transparent)]
    File(#[from] GgufError),
    /// A metadata key is missing.
    #[error("{}: metadata `{key}` is missing; convert the model again", path.display())]
    MissingKey {
        /// Path of the file.
        path: PathBuf,
        /// Name of the metadata key.
        key: String,
    },
    /// The model needs an unsupported feature.
    #[error("{}: {what} is not supported; use a model without it, of a family that \
             docs/reference/models.md lists", path.display())]
    Unsupported {
        /// Path of the file.
        path: PathBuf,
        /// Name of the feature.
        what: String,
    },
    /// The declared shape is invalid.
    #[error("{}: {source}; convert the model again", path.display())]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// Defect of the shape.
        source: ModelConfigError,
    },
    /// The tensors do not match the declared shape.
    #[error("{}: {source}; fetch or convert the model again", path.display())]
    Layout {
        /// Path of the file.
        path: PathBuf,
        /// First tensor that does not match.
        source: LayoutError,
    },
}

/// A model in a GGUF file, opened and checked.
#[derive(Debug)]
pub struct GgufSource {
    file: GgufFile,
    family: Family,
    config: ModelConfig,
}

impl GgufSource {
    /// Maps the file at `path` and checks that it holds a complete model of a known architecture.
    ///
    /// # Errors
    /// The file is broken, has another architecture, or lacks a tensor.
    pub fn open(path: &Path) -> Result<Self, GgufSourceError> {
        Self::new(GgufFile::open(path)?)
    }

    /// Checks that an open file holds a complete model of a known architecture.
    ///
    /// # Errors
    /// The file has another architecture or lacks a tensor.
    pub fn new(file: GgufFile) -> Result<Self, GgufSourceError> {
        let reader = GgufMetadata::new(&file)?;
        reader.refuse_unsupported()?;
        let family = reader.family;
        let config = reader.config()?;
        layout::check_config(&config)
            .map_err(|source| GgufSourceError::Config { path: file.path().to_path_buf(), source })?;
        let source = Self { file, family, config };
        source.check_tensors()?;
        Ok(source)
    }

    /// Returns the open file, for its tokenizer and chat template.
    #[must_use]
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    fn check_tensors(&self) -> Result<(), GgufSourceError> {
        let stacked = self.config.experts.as_ref().map(|experts| experts.count);
        let shape = |name: &str| {
            let view = self.file.tensor(name)?;
            let fits = view.dims.get(2).is_none_or(|&depth| stacked.is_none_or(|count| count == depth));
            Some([if fits { view.rows() } else { view.dims[1] }, view.cols()])
        };
        // Biases are optional; present ones are checked like all other tensors.
        let present = |id: &TensorId| self.file.tensor(&tensor_name(&self.config, *id)).is_some();
        let biases = (0..self.config.layers).flat_map(|layer| {
            layer_targets(&self.config, layer).iter().map(move |&target| TensorId::Bias(layer, target))
        });
        let expected: Vec<TensorId> = layout::required_tensors(&self.config, self.family.biased())
            .chain(biases.filter(present))
            .collect();
        let expected = || {
            let places = expected.iter().map(|&id| place(&self.config, id));
            places.map(|place| (place.tensor, place.shape))
        };
        layout::check_tensors(expected(), shape)
            .map_err(|source| GgufSourceError::Layout { path: self.file.path().to_path_buf(), source })?;
        let mut known: HashSet<String> = expected().map(|(name, _)| name).collect();
        known.insert(ROPE_FACTORS.to_owned());
        if self.family == Family::Phi3 {
            known.extend([ROPE_SHORT_FACTORS, ROPE_LONG_FACTORS].map(str::to_owned));
        }
        for (name, view) in self.file.tensors() {
            if !known.contains(name) {
                return Err(self.unsupported(format!("tensor `{name}`")));
            }
            if view.rows() == 1 && view.kind.block_elements() != 1 {
                return Err(self.unsupported(format!("the quantized vector `{name}`")));
            }
        }
        Ok(())
    }

    fn unsupported(&self, what: String) -> GgufSourceError {
        GgufSourceError::Unsupported { path: self.file.path().to_path_buf(), what }
    }

    fn is_interleaved(&self, id: TensorId) -> bool {
        self.family.is_interleaved()
            && matches!(
                id,
                TensorId::Weight(_, Target::Q | Target::K) | TensorId::Bias(_, Target::Q | Target::K)
            )
    }
}

impl WeightSource for GgufSource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        let place = place(&self.config, id);
        let TensorView { kind, data, .. } = self.file.tensor(&place.tensor)?;
        let data = place.part_of(data);
        let [rows, cols] = layout::tensor_shape(&self.config, id);
        let data = if self.is_interleaved(id) {
            // An output feature is a row of a matrix, and an element of a bias.
            let features = if let TensorId::Bias(..) = id { cols } else { rows };
            Cow::Owned(half_rotation_rows(data, data.len() / features, self.config.head_dim))
        } else if let (TensorId::OutputNorm, Some(divisor)) = (id, self.config.traits.logit_divisor) {
            return Some(divided_norm(kind, data, cols, divisor));
        } else {
            Cow::Borrowed(data)
        };
        Some(Tensor { kind, rows, cols, data })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        match (id, self.config.traits.logit_divisor) {
            (TensorId::OutputNorm, Some(_)) => Some(TensorType::F32),
            _ => Some(self.file.tensor(&place(&self.config, id).tensor)?.kind),
        }
    }

    fn release(&self, id: TensorId) {
        self.file.release(&place(&self.config, id).tensor);
    }

    fn unchanged(&self) -> bool {
        self.file.unchanged()
    }
}

/// Whether files of this architecture store the rows of q and k for adjacent rotary pairs.
pub(crate) fn is_interleaved(architecture: &str) -> bool {
    Family::of_gguf(architecture).is_some_and(Family::is_interleaved)
}

/// Reorders the output features of q or k from interleaved rotary pairs, `(0, 1), (2, 3), ...`, to pairs half
/// a head apart, `(0, d/2), (1, d/2 + 1), ...`. `data` holds complete heads, each feature `feature_bytes`
/// long. Features are moved unread, so any encoding works.
pub(crate) fn half_rotation_rows(data: &[u8], feature_bytes: usize, head_dim: usize) -> Vec<u8> {
    let mut reordered = Vec::with_capacity(data.len());
    for head in data.chunks_exact(feature_bytes * head_dim) {
        for first in [0, feature_bytes] {
            for pair in head.chunks_exact(2 * feature_bytes) {
                reordered.extend_from_slice(&pair[first..first + feature_bytes]);
            }
        }
    }
    reordered
}
