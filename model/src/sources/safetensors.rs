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
use kernels::TensorType;

use crate::{
    shape::{
        config::ModelConfig,
        layout::{self, BLOCK_TARGETS, LayoutError},
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::{
        fused::Place,
        hf_config::HfConfig,
        hf_names::{module_name, place},
        norms::{divided_norm, norm_and_one},
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
    norms_less_one: bool,
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
        let HfConfig { model: config, biased, norms_less_one, quantization } =
            HfConfig::parse(&json).map_err(|source| SafetensorsSourceError::Config { path, source })?;
        let others = if quantization.is_some() { OtherTypes::Listed } else { OtherTypes::Refused };
        let shards = Shards::open(directory, others)?;
        let source =
            Self { directory: directory.to_path_buf(), config, norms_less_one, quantization, shards };
        source.check_tensors(&biased)?;
        Ok(source)
    }

    /// The parts of the linear layer at `place`, if it is quantized.
    fn parts(&self, place: &Place) -> Result<Option<Parts<'_>>, LayoutError> {
        match (self.quantization, place.module()) {
            (Some(quantization), Some(module)) => Parts::of(&self.shards, quantization, module, place.shape),
            _ => Ok(None),
        }
    }

    /// The weight files.
    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    fn check_tensors(&self, biased: &[Target]) -> Result<(), SafetensorsSourceError> {
        let refuse = |source| SafetensorsSourceError::Layout { path: self.directory.clone(), source };
        let (mut matrices, mut known) = (Vec::new(), HashSet::new());
        for id in self.expected(biased) {
            let place = place(&self.config, id);
            match self.parts(&place).map_err(refuse)? {
                Some(_) => known.extend(part_names(&place)),
                None => matrices.push((place.tensor, place.shape)),
            }
        }
        let shape = |name: &str| self.shards.tensor(name)?.matrix_shape();
        layout::check_tensors(matrices.iter().cloned(), shape).map_err(refuse)?;
        known.extend(matrices.into_iter().map(|(name, _)| name));
        // Some models store a tied head once more; transformers ignores it too.
        known.insert(module_name(0, Target::LmHead) + ".weight");
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
            self.quantization.is_some() && self.shards.tensor(&place(&self.config, *id).tensor).is_some()
        };
        let biases = (0..self.config.layers)
            .flat_map(|layer| BLOCK_TARGETS.map(|target| TensorId::Bias(layer, target)))
            .filter(|id| is_stored(id) && !required.contains(id));
        required.iter().copied().chain(biases).collect()
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
        let place = place(&self.config, id);
        // They were checked when the files were opened.
        if let Some(parts) = self.parts(&place).ok().flatten() {
            return Some(parts.tensor(place.rows()));
        }
        let stored = self.shards.tensor(&place.tensor)?;
        let [_, cols] = place.shape;
        let rows = place.rows().len();
        let data = place.part_of(self.shards.bytes(&place.tensor)?);
        Some(match (id, self.config.traits.logit_divisor) {
            (TensorId::OutputNorm, Some(divisor)) => divided_norm(stored.kind, data, cols, divisor),
            _ if self.norms_less_one && id.is_norm() => norm_and_one(stored.kind, data, cols),
            _ => Tensor { kind: stored.kind, rows, cols, data: data.into() },
        })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        match self.parts(&place(&self.config, id)).ok().flatten() {
            Some(parts) => Some(parts.kind()),
            None => self.tensor(id).map(|tensor| tensor.kind),
        }
    }

    fn release(&self, id: TensorId) {
        let place = place(&self.config, id);
        self.shards.release(&place.tensor);
        part_names(&place).for_each(|part| self.shards.release(&part));
    }

    fn unchanged(&self) -> bool {
        self.shards.unchanged()
    }
}

/// What the parts of the linear layer at `place` are called, if it is quantized.
fn part_names(place: &Place) -> impl Iterator<Item = String> {
    let module = place.module();
    module.into_iter().flat_map(|module| PARTS.map(|part| format!("{module}.{part}")))
}

/// `config.json` of a directory, not parsed yet, and where it is.
pub(crate) fn read_config(directory: &Path) -> Result<(PathBuf, Vec<u8>), SafetensorsSourceError> {
    let path = directory.join(CONFIG_FILE);
    match whole_file::read(&path, MAX_CONFIG_BYTES) {
        Ok(json) => Ok((path, json)),
        Err(source) => Err(SafetensorsSourceError::Read { path, source }),
    }
}
