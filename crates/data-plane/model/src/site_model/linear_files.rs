//! Linear layers of a safetensors directory of any architecture.
//!
//! Only names and shapes identify a linear layer: a matrix `X.weight` that is no embedding is one, with
//! `X.bias` if that exists. Two facts about some architectures are built in: which models store transposed
//! matrices ([`TRANSPOSED`]), and that a head may share the token embedding's weights.

use std::{borrow::Cow, path::Path, sync::Arc};

use kernels::{Arena, PackedMatrix, quant::dequantize_row};
use model_files::{bounded_json, text_hash::TextHash};
use serde::Deserialize;
use serde_json::Value;

use super::SiteModelError;
use crate::{
    shape::{
        identity::{Hashes, Identity},
        layout::MAX_DIMENSION,
    },
    sources::safetensors::{
        file::StoredTensor,
        read_config,
        shards::{OtherTypes, Shards},
    },
    weights::{
        packing::{ProgressCallback, pack_all},
        sites::{Linear, SiteWeights},
    },
};

/// Maximum number of linear layers; mixtures of experts have tens of thousands.
pub const MAX_SITES: usize = 1 << 16;
/// Maximum bytes of a linear layer's name.
pub const MAX_NAME_BYTES: usize = 256;

/// Model types that store some matrices as `[in, out]`, and the layers concerned.
const TRANSPOSED: [&str; 4] = ["gpt2", "openai-gpt", "imagegpt", "decision_transformer"];
const TRANSPOSED_LAYERS: [&str; 4] = ["c_attn", "c_proj", "c_fc", "q_attn"];

/// Names of token embeddings; the first one found belongs to a tied head.
const TOKEN_EMBEDDINGS: [&str; 6] =
    ["wte", "embed_tokens", "word_embeddings", "embed_in", "tok_embeddings", "shared"];
/// Names of other tables, besides all that end in `embedding` or `embeddings`.
const OTHER_TABLES: [&str; 4] =
    ["wpe", "embed_positions", "embed_tokens_per_layer", "relative_attention_bias"];
const HEADS: [&str; 4] = ["lm_head", "embed_out", "output", "head"];
/// Suffixes of model classes with a head.
const WITH_HEAD: [&str; 3] = ["ForCausalLM", "LMHeadModel", "ForConditionalGeneration"];

/// Name of a head that the files do not store.
const TIED_HEAD: &str = "lm_head";

#[derive(Debug, Deserialize)]
struct LinearFilesConfig {
    model_type: String,
    #[serde(default)]
    architectures: Option<Vec<String>>,
    tie_word_embeddings: Option<bool>,
    quantization_config: Option<Value>,
}

impl LinearFilesConfig {
    fn read(directory: &Path) -> Result<Self, SiteModelError> {
        let (path, json) = read_config(directory)?;
        let refused = |reason| SiteModelError::Config { path: path.clone(), reason };
        let config: Self = bounded_json::parse(&json).map_err(|error| refused(error.to_string()))?;
        match &config.quantization_config {
            Some(_) => {
                Err(refused("its weights are quantized; only F32, F16 and BF16 are supported".to_owned()))
            }
            None => Ok(config),
        }
    }

    /// Whether the model has a head, which must be tied if it is not stored.
    fn has_head(&self) -> bool {
        let is_head = |name: &String| WITH_HEAD.iter().any(|end| name.ends_with(end));
        self.tie_word_embeddings != Some(false)
            && self.architectures.as_ref().is_none_or(|names| names.is_empty() || names.iter().any(is_head))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MatrixOrientation {
    OutIn,
    InOut,
}

#[derive(Debug)]
struct Layer {
    name: String,
    weight: String,
    bias: Option<String>,
    stored: MatrixOrientation,
}

/// A directory's linear layers, checked but not read yet.
#[derive(Debug)]
pub(crate) struct LinearFiles {
    shards: Shards,
    architecture: String,
    layers: Vec<Layer>,
    hashes: Hashes<String>,
}

impl LinearFiles {
    /// Maps the weight files in `directory` and finds the linear layers.
    ///
    /// # Errors
    /// A file is missing or broken, or a linear layer has an unsupported type or shape.
    pub(crate) fn open(directory: &Path) -> Result<Self, SiteModelError> {
        let config = LinearFilesConfig::read(directory)?;
        let shards = Shards::open(directory, OtherTypes::Listed)?;
        let (architecture, layers) = (config.model_type.clone(), Vec::new());
        let mut files = Self { shards, architecture, layers, hashes: Hashes::default() };
        files.refuse_other_types(directory)?;
        let transposed = TRANSPOSED.contains(&config.model_type.as_str());
        files.layers = files.found(transposed);
        files.tie_head(&config);
        // Layers are sorted by block number; the head and other layers outside of blocks come last.
        files.layers.sort_by(|left, right| order(&left.name).cmp(&order(&right.name)));
        files.check(directory)?;
        Ok(files)
    }

    pub(crate) fn architecture(&self) -> &str {
        &self.architecture
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Returns the tensors that belong to no linear layer.
    pub(crate) fn rest(&self) -> impl Iterator<Item = &str> {
        let of_layer = |name: &str| {
            let module = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name);
            let found = self.layers.binary_search_by(|layer| order(&layer.name).cmp(&order(module)));
            // A tied head's weights are the embedding's, which clients receive.
            found.is_ok_and(|at| self.layers[at].name == module)
        };
        self.shards.names().filter(move |name| !of_layer(name))
    }

    fn refuse_other_types(&self, directory: &Path) -> Result<(), SiteModelError> {
        let is_linear = |name: &str| linear_name(name).is_some();
        match self.shards.others().find(|other| other.shape.len() == 2 && is_linear(&other.name)) {
            None => Ok(()),
            Some(other) => {
                let reason = format!("has type {:?}; F32, F16 and BF16 are supported", other.kind);
                Err(refused(directory, &other.name, reason))
            }
        }
    }

    fn found(&self, transposed: bool) -> Vec<Layer> {
        let layer = |weight: &str| {
            let name = linear_name(weight)?;
            let is_matrix = self.shards.tensor(weight).is_some_and(|stored| stored.shape.len() == 2);
            let in_out = transposed && TRANSPOSED_LAYERS.contains(&last(name));
            let stored = if in_out { MatrixOrientation::InOut } else { MatrixOrientation::OutIn };
            is_matrix.then(|| self.layer(name, weight, stored))
        };
        self.shards.names().filter_map(layer).collect()
    }

    fn layer(&self, name: &str, weight: &str, stored: MatrixOrientation) -> Layer {
        let bias = Some(format!("{name}.bias")).filter(|bias| self.shards.tensor(bias).is_some());
        Layer { name: name.to_owned(), weight: weight.to_owned(), bias, stored }
    }

    /// Adds a head with the token embedding's weights, if the model has a tied head. If the configuration
    /// says that the head is tied, a stored head is ignored, as in transformers.
    fn tie_head(&mut self, config: &LinearFilesConfig) {
        let is_head = |layer: &Layer| HEADS.contains(&last(&layer.name));
        let stored = self.layers.iter().any(is_head);
        if !config.has_head() || (stored && config.tie_word_embeddings != Some(true)) {
            return;
        }
        let is_embedding = |name: &&str, of: &str| name.strip_suffix(".weight").map(last) == Some(of);
        let embedding = TOKEN_EMBEDDINGS
            .iter()
            .find_map(|of| self.shards.names().find(|name| is_embedding(name, of)))
            .filter(|name| self.shards.tensor(name).is_some_and(|stored| stored.shape.len() == 2));
        if let Some(embedding) = embedding {
            let head = self.layer(TIED_HEAD, embedding, MatrixOrientation::OutIn);
            self.layers.retain(|layer| !is_head(layer));
            self.layers.push(head);
        }
    }

    fn check(&self, directory: &Path) -> Result<(), SiteModelError> {
        if self.layers.is_empty() || self.layers.len() > MAX_SITES {
            let (path, found) = (directory.to_path_buf(), self.layers.len());
            return Err(SiteModelError::Count { path, found });
        }
        for layer in &self.layers {
            let refused = |reason| Err(refused(directory, &layer.weight, reason));
            let [rows, columns] = self.shape(layer);
            if layer.name.len() > MAX_NAME_BYTES {
                return refused(format!("has a name of more than {MAX_NAME_BYTES} bytes"));
            }
            if [rows, columns].iter().any(|&size| size == 0 || size > MAX_DIMENSION) {
                return refused(format!(
                    "is {rows} x {columns}; sizes from 1 to {MAX_DIMENSION} are supported"
                ));
            }
            let bias = layer.bias.as_ref().and_then(|bias| self.shards.tensor(bias));
            if let Some(bias) = bias.filter(|bias| *bias.shape != [rows]) {
                return refused(format!("has {rows} outputs but a bias of shape {:?}", bias.shape));
            }
        }
        Ok(())
    }

    fn stored(&self, tensor: &str) -> &StoredTensor {
        self.shards.tensor(tensor).expect("layers are made of tensors that are there")
    }

    /// Returns the shape of a layer, `[out, in]`.
    fn shape(&self, layer: &Layer) -> [usize; 2] {
        let shape = self.stored(&layer.weight).matrix_shape().expect("weights are matrices");
        match layer.stored {
            MatrixOrientation::OutIn => shape,
            MatrixOrientation::InOut => [shape[1], shape[0]],
        }
    }

    pub(crate) fn pack(
        &self,
        threads: usize,
        on_progress: ProgressCallback<'_>,
    ) -> Result<SiteWeights, SiteModelError> {
        let elements = |layer: &Layer| self.shape(layer).iter().map(|&size| size as u64).product();
        let packed = pack_all(&self.layers, elements, threads, on_progress, |arena, layer| {
            self.pack_layer(arena, layer).map(|linear| vec![linear])
        })?;
        Ok(SiteWeights::new(packed, None))
    }

    fn pack_layer(&self, arena: &Arena, layer: &Layer) -> Result<Linear, SiteModelError> {
        let ([rows, columns], kind) = (self.shape(layer), self.stored(&layer.weight).kind);
        let mut data = Cow::Borrowed(self.bytes(&layer.weight));
        self.hashes.of(&layer.weight, &data);
        if layer.stored == MatrixOrientation::InOut {
            data = Cow::Owned(transposed(&data, columns, rows, kind.block_bytes()));
        }
        let matrix = PackedMatrix::pack_in(arena, kind, &data, rows, columns)
            .map_err(|source| SiteModelError::Pack { tensor: layer.weight.clone(), source })?;
        self.shards.release(&layer.weight);
        let bias = layer.bias.as_ref().map(|bias| {
            let mut values = vec![0.0; rows];
            dequantize_row(self.stored(bias).kind, self.bytes(bias), &mut values);
            values
        });
        Ok(Linear { name: layer.name.clone(), matrix: Arc::new(matrix), bias })
    }

    fn bytes(&self, tensor: &str) -> &[u8] {
        self.shards.bytes(tensor).expect("layers are made of tensors that are there")
    }

    /// Returns the identity of this base, from its linear layers and all tensors.
    pub(crate) fn identity(&self, text: TextHash) -> [u8; 32] {
        let mut identity = Identity::new(text);
        identity.add(&self.architecture);
        for layer in &self.layers {
            identity.add(&format!("{layer:?}"));
        }
        for name in self.shards.names() {
            let (name, stored) = (name.to_owned(), self.stored(name));
            let hash = self.hashes.known(&name).unwrap_or_else(|| {
                let hash = self.hashes.of(&name, self.bytes(&name));
                self.shards.release(&name);
                hash
            });
            identity.add_tensor(&format!("{name} {:?} {:?}", stored.kind, stored.shape), hash);
        }
        identity.finish()
    }
}

fn refused(directory: &Path, tensor: &str, reason: String) -> SiteModelError {
    let tensor = tensor.escape_debug().to_string();
    SiteModelError::Tensor { path: directory.to_path_buf(), tensor, reason }
}

fn last(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Returns the module of a matrix that is no table.
fn linear_name(tensor: &str) -> Option<&str> {
    let name = tensor.strip_suffix(".weight")?;
    let kind = last(name);
    let is_table = TOKEN_EMBEDDINGS.contains(&kind)
        || OTHER_TABLES.contains(&kind)
        || kind.ends_with("embedding")
        || kind.ends_with("embeddings");
    (!is_table && !name.is_empty()).then_some(name)
}

/// Sorts by block number, with layers outside of blocks last, then by name.
fn order(name: &str) -> (u64, &str) {
    (name.split('.').find_map(|part| part.parse().ok()).unwrap_or(u64::MAX), name)
}

/// Transposes `[rows, columns]` elements of `element` bytes each.
fn transposed(data: &[u8], rows: usize, columns: usize, element: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len());
    for column in 0..columns {
        for row in 0..rows {
            let at = (row * columns + column) * element;
            out.extend_from_slice(&data[at..at + element]);
        }
    }
    out
}
