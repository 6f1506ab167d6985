//! A model in a Hugging Face directory: `config.json` beside one safetensors file or a sharded set of them.
//!
//! # Layout
//!
//! - this file: the model. `shards`: its weight files. [`file`](mod@file): the table of contents of one. `quantized`: linear layers of
//!   GPTQ and AWQ. `error`: why they are refused.

mod error;
pub mod file;
pub(crate) mod quantized;
pub(crate) mod shards;

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use files::{model_files::CONFIG_FILE, whole_file};
use kernels::{TensorType, quant::dequantize_row};

use crate::{
    shape::{
        config::ModelConfig,
        layout::{self, BLOCK_TARGETS, LayoutError},
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::{
        hf_config::{HfConfig, StoredNorms},
        hf_names::{module_name, tensor_name},
        quantization::Quantization,
        safetensors::{
            quantized::{PARTS, Parts},
            shards::{OtherTypes, Shards},
        },
    },
};

pub use self::error::SafetensorsSourceError;

/// Bytes of `config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// A model in a Hugging Face directory, opened and checked.
#[derive(Debug)]
pub struct SafetensorsSource {
    directory: PathBuf,
    config: ModelConfig,
    norms: StoredNorms,
    quantization: Option<Quantization>,
    shards: Shards,
}

impl SafetensorsSource {
    /// Maps the weight files in `directory` and checks that they hold a whole model of a known architecture.
    ///
    /// # Errors
    /// If a file is missing or broken, the architecture is another one, or a tensor is missing or too many.
    pub fn open(directory: &Path) -> Result<Self, SafetensorsSourceError> {
        let (path, json) = read_config(directory)?;
        let HfConfig { model: config, biased, norms, quantization } =
            HfConfig::parse(&json).map_err(|source| SafetensorsSourceError::Config { path, source })?;
        let others = if quantization.is_some() { OtherTypes::Listed } else { OtherTypes::Refused };
        let shards = Shards::open(directory, others)?;
        let source = Self { directory: directory.to_path_buf(), config, norms, quantization, shards };
        source.check_tensors(&biased)?;
        Ok(source)
    }

    /// The parts of a linear layer that is quantized; `None` if it is not.
    fn parts(&self, id: TensorId) -> Result<Option<Parts<'_>>, LayoutError> {
        let (Some(quantization), TensorId::Weight(layer, target)) = (self.quantization, id) else {
            return Ok(None);
        };
        let shape = layout::tensor_shape(&self.config, id);
        Parts::of(&self.shards, quantization, &module_name(layer, target), shape)
    }

    /// The weight files.
    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    fn check_tensors(&self, biased: &[Target]) -> Result<(), SafetensorsSourceError> {
        let refuse = |source| SafetensorsSourceError::Layout { path: self.directory.clone(), source };
        let name_of = |id| tensor_name(&self.config, id);
        let (mut matrices, mut known) = (Vec::new(), HashSet::new());
        for id in self.expected(biased) {
            match self.parts(id).map_err(refuse)? {
                Some(_) => known.extend(self.part_names(id)),
                None => matrices.push(id),
            }
        }
        let shape = |name: &str| self.shards.tensor(name)?.matrix_shape();
        layout::check_tensors(&self.config, matrices.iter().copied(), name_of, shape).map_err(refuse)?;
        known.extend(matrices.into_iter().map(name_of));
        // Some models store a tied head once more; transformers ignores it too.
        known.insert(name_of(TensorId::Weight(0, Target::LmHead)));
        // Old files keep the rotary frequencies, which the configuration gives as well.
        let unknown = |name: &&str| !known.contains(*name) && !name.ends_with(".rotary_emb.inv_freq");
        let others = self.shards.others().map(|other| other.name.as_str());
        match self.shards.names().chain(others).find(unknown) {
            None => Ok(()),
            Some(tensor) => Err(SafetensorsSourceError::UnknownTensor {
                path: self.directory.clone(),
                tensor: tensor.escape_debug().to_string(),
            }),
        }
    }

    /// The tensors that there are to be. Quantized layers have a bias wherever their files have one.
    fn expected(&self, biased: &[Target]) -> Vec<TensorId> {
        let required: Vec<TensorId> = layout::required_tensors(&self.config, biased).collect();
        let is_stored = |id: &TensorId| {
            self.quantization.is_some() && self.shards.tensor(&tensor_name(&self.config, *id)).is_some()
        };
        let biases = (0..self.config.layers)
            .flat_map(|layer| BLOCK_TARGETS.map(|target| TensorId::Bias(layer, target)))
            .filter(|id| is_stored(id) && !required.contains(id));
        required.iter().copied().chain(biases).collect()
    }

    /// What the parts of a quantized layer are called.
    fn part_names(&self, id: TensorId) -> Vec<String> {
        let TensorId::Weight(layer, target) = id else { return Vec::new() };
        let module = module_name(layer, target);
        PARTS.iter().map(|part| format!("{module}.{part}")).collect()
    }
}

impl WeightSource for SafetensorsSource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        if self.config.tied_head && id == TensorId::Weight(0, Target::LmHead) {
            return None;
        }
        // They were checked when the files were opened.
        if let Some(parts) = self.parts(id).ok().flatten() {
            return Some(parts.tensor());
        }
        let name = tensor_name(&self.config, id);
        let stored = self.shards.tensor(&name)?;
        let [rows, cols] = stored.matrix_shape()?;
        let data = self.shards.bytes(&name)?;
        if self.norms == StoredNorms::LessOne && id.is_norm() {
            return Some(Tensor {
                kind: TensorType::F32,
                rows,
                cols,
                data: one_more(stored.kind, data, cols).into(),
            });
        }
        Some(Tensor { kind: stored.kind, rows, cols, data: data.into() })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        match self.parts(id).ok().flatten() {
            Some(parts) => Some(parts.kind()),
            None => self.tensor(id).map(|tensor| tensor.kind),
        }
    }

    fn release(&self, id: TensorId) {
        self.shards.release(&tensor_name(&self.config, id));
        self.part_names(id).iter().for_each(|part| self.shards.release(part));
    }

    fn unchanged(&self) -> bool {
        self.shards.unchanged()
    }
}

/// The weights of a norm that are stored less 1, as floats of 32 bits: transformers adds it in these, too.
fn one_more(kind: TensorType, stored: &[u8], count: usize) -> Vec<u8> {
    let mut weights = vec![0.0; count];
    dequantize_row(kind, stored, &mut weights);
    weights.iter().flat_map(|weight| (1.0 + weight).to_le_bytes()).collect()
}

/// `config.json` of a directory, not parsed yet, and where it is.
pub(crate) fn read_config(directory: &Path) -> Result<(PathBuf, Vec<u8>), SafetensorsSourceError> {
    let path = directory.join(CONFIG_FILE);
    match whole_file::read(&path, MAX_CONFIG_BYTES) {
        Ok(json) => Ok((path, json)),
        Err(source) => Err(SafetensorsSourceError::Read { path, source }),
    }
}
