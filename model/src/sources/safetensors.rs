//! A model in a Hugging Face directory: `config.json` beside one safetensors file or a sharded set of them.
//!
//! # Layout
//!
//! - this file: the model. `shards`: its weight files. [`file`](mod@file): the table of contents of one. `error`: why they
//!   are refused.

mod error;
pub mod file;
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
        layout,
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::{
        hf_config::{HfConfig, Stored},
        hf_names::{module_name, place},
        norms::{divided_norm, norm_and_one},
        safetensors::shards::{OtherTypes, Shards},
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
    stored: Stored,
    shards: Shards,
}

impl SafetensorsSource {
    /// Maps the weight files in `directory` and checks that they hold a whole model of a known architecture.
    ///
    /// # Errors
    /// If a file is missing or broken, the architecture is another one, or a tensor is missing or too many.
    pub fn open(directory: &Path) -> Result<Self, SafetensorsSourceError> {
        let (path, json) = read_config(directory)?;
        let HfConfig { model: config, biased, stored } =
            HfConfig::parse(&json).map_err(|source| SafetensorsSourceError::Config { path, source })?;
        let shards = Shards::open(directory, OtherTypes::Refused)?;
        let source = Self { directory: directory.to_path_buf(), config, stored, shards };
        source.check_tensors(&biased)?;
        Ok(source)
    }

    /// The weight files.
    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    fn check_tensors(&self, biased: &[Target]) -> Result<(), SafetensorsSourceError> {
        let shape = |name: &str| self.shards.tensor(name)?.matrix_shape();
        let required = || {
            let places = layout::required_tensors(&self.config, biased).map(|id| place(&self.config, id));
            places.map(|place| (place.tensor, place.shape))
        };
        layout::check_tensors(required(), shape)
            .map_err(|source| SafetensorsSourceError::Layout { path: self.directory.clone(), source })?;
        let mut known: HashSet<String> = required().map(|(name, _)| name).collect();
        // Some models store a tied head once more; transformers ignores it too.
        known.insert(module_name(0, Target::LmHead) + ".weight");
        // Old files keep the rotary frequencies, which the configuration gives as well.
        let unknown = |name: &&str| !known.contains(*name) && !name.ends_with(".rotary_emb.inv_freq");
        match self.shards.names().find(unknown) {
            None => Ok(()),
            Some(tensor) => Err(SafetensorsSourceError::UnknownTensor {
                path: self.directory.clone(),
                tensor: tensor.escape_debug().to_string(),
            }),
        }
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
        let stored = self.shards.tensor(&place.tensor)?;
        let [rows, cols] = stored.matrix_shape()?;
        let rows = place.fused.as_ref().map_or(rows, |fused| fused.rows.len());
        let data = place.part_of(self.shards.bytes(&place.tensor)?);
        Some(match (id, self.stored.logits_scaling) {
            (TensorId::OutputNorm, Some(divisor)) => divided_norm(stored.kind, data, cols, divisor),
            _ if self.stored.norms_less_one && id.is_norm() => norm_and_one(stored.kind, data, cols),
            _ => Tensor { kind: stored.kind, rows, cols, data: data.into() },
        })
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        self.tensor(id).map(|tensor| tensor.kind)
    }

    fn release(&self, id: TensorId) {
        self.shards.release(&place(&self.config, id).tensor);
    }

    fn unchanged(&self) -> bool {
        self.shards.unchanged()
    }
}

/// `config.json` of a directory, not parsed yet, and where it is.
pub(crate) fn read_config(directory: &Path) -> Result<(PathBuf, Vec<u8>), SafetensorsSourceError> {
    let path = directory.join(CONFIG_FILE);
    match whole_file::read(&path, MAX_CONFIG_BYTES) {
        Ok(json) => Ok((path, json)),
        Err(source) => Err(SafetensorsSourceError::Read { path, source }),
    }
}
