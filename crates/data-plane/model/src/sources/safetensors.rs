//! A model in a Hugging Face directory: `config.json` with one safetensors file or several shards.
//!
//! # Layout
//!
//! - this file: the model and its tensors.
//! - `shards`: the weight files of a directory.
//! - [`file`](mod@file): the table of contents of one file.
//! - `quantized`: linear layers of GPTQ and AWQ.
//! - `interleaved_experts`: experts of gpt-oss.
//! - `error`: reasons for refusing the files.

mod error;
pub mod file;
mod interleaved_experts;
pub(crate) mod quantized;
pub(crate) mod shards;

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use kernels::TensorType;
use model_files::{model_files::CONFIG_FILE, whole_file};

use crate::{
    shape::{
        config::ModelConfig,
        experts::{ExpertId, ExpertPart},
        layout::{self, LayoutError, layer_targets},
        source::{Target, Tensor, TensorId, WeightSource},
    },
    sources::{
        fused::TensorLocation,
        hf_config::HfConfig,
        hf_names::{interleaves_experts, module_name, place, stacked_place},
        norms::{divided_norm, norm_and_one},
        quantization::Quantization,
        safetensors::{
            interleaved_experts::InterleavedExperts,
            quantized::{PARTS, QuantizedParts},
            shards::{OtherTypes, Shards},
        },
    },
};

pub use self::error::SafetensorsSourceError;

const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// A model in a Hugging Face directory, opened and checked.
#[derive(Debug)]
pub struct SafetensorsSource {
    directory: PathBuf,
    config: ModelConfig,
    norms_less_one: bool,
    quantization: Option<Quantization>,
    shards: Shards,
    experts: ExpertLayout,
}

/// Storage of the experts of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertLayout {
    /// A tensor for each linear layer of each expert.
    Separate,
    /// One tensor for gate and up of all experts, and one for down.
    Stacked,
    /// As [`InterleavedExperts`] says, as MXFP4 blocks or not.
    Interleaved { are_mxfp4: bool },
}

impl SafetensorsSource {
    /// Maps the weight files in `directory` and checks that they hold a complete known model.
    ///
    /// # Errors
    /// A file is missing or broken, the architecture is unknown, or a tensor is missing or superfluous.
    pub fn open(directory: &Path) -> Result<Self, SafetensorsSourceError> {
        let (path, json) = read_config(directory)?;
        let HfConfig { model: config, biased, norms_less_one, quantization, has_mxfp4_experts } =
            HfConfig::parse(&json).map_err(|source| SafetensorsSourceError::Config { path, source })?;
        let are_listed = quantization.is_some() || has_mxfp4_experts;
        let others = if are_listed { OtherTypes::Listed } else { OtherTypes::Refused };
        let shards = Shards::open(directory, others)?;
        let directory = directory.to_path_buf();
        let experts = match interleaves_experts(&config) {
            true => ExpertLayout::Interleaved { are_mxfp4: has_mxfp4_experts },
            false => ExpertLayout::Separate,
        };
        let mut source = Self { directory, config, norms_less_one, quantization, shards, experts };
        if source.has_stacks() {
            source.experts = ExpertLayout::Stacked;
        }
        source.check_tensors(&biased)?;
        Ok(source)
    }

    fn has_stacks(&self) -> bool {
        if self.experts != ExpertLayout::Separate {
            return false;
        }
        let first = (0..self.config.layers).find(|&layer| self.config.experts_of(layer).is_some());
        let id = first.map(|layer| TensorId::Expert(layer, ExpertId(0), ExpertPart::Down));
        id.is_some_and(|id| self.shards.tensor(&stacked_place(&self.config, id).tensor).is_some())
    }

    pub(crate) fn place(&self, id: TensorId) -> TensorLocation {
        if self.experts == ExpertLayout::Stacked {
            stacked_place(&self.config, id)
        } else {
            place(&self.config, id)
        }
    }

    /// Returns the parts of the linear layer at `place`, if it is quantized.
    fn parts(&self, place: &TensorLocation) -> Result<Option<QuantizedParts<'_>>, LayoutError> {
        match (self.quantization, place.module()) {
            (Some(quantization), Some(module)) => {
                QuantizedParts::of(&self.shards, quantization, module, place.shape)
            }
            _ => Ok(None),
        }
    }

    /// Returns the block of experts with the tensor `id`, if the files have such blocks.
    fn interleaved(&self, id: TensorId) -> Option<InterleavedExperts<'_>> {
        match self.experts {
            ExpertLayout::Interleaved { are_mxfp4 } => {
                InterleavedExperts::of(&self.shards, &self.config, are_mxfp4, id)
            }
            ExpertLayout::Separate | ExpertLayout::Stacked => None,
        }
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    fn check_tensors(&self, biased: &[Target]) -> Result<(), SafetensorsSourceError> {
        let refuse = |source| SafetensorsSourceError::Layout { path: self.directory.clone(), source };
        let (mut matrices, mut known) = (Vec::new(), HashSet::new());
        for id in self.expected(biased) {
            if let Some(experts) = self.interleaved(id) {
                known.extend(experts.check().map_err(refuse)?);
                continue;
            }
            let place = self.place(id);
            match self.parts(&place).map_err(refuse)? {
                Some(_) => known.extend(part_names(&place)),
                None => matrices.push((place.tensor, place.shape)),
            }
        }
        let shape = |name: &str| self.shape(name);
        layout::check_tensors(matrices.iter().cloned(), shape).map_err(refuse)?;
        known.extend(matrices.into_iter().map(|(name, _)| name));
        // Some models also store a tied head, which transformers ignores, too.
        known.insert(module_name(0, Target::LmHead) + ".weight");
        // Old files store rotary frequencies, which also follow from the configuration.
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

    /// Returns `[rows, cols]` of a tensor; stacked experts count as one matrix.
    fn shape(&self, name: &str) -> Option<[usize; 2]> {
        let stored = self.shards.tensor(name)?;
        match (&*stored.shape, &self.config.experts) {
            (&[depth, rows, cols], Some(experts)) if depth == experts.count => Some([depth * rows, cols]),
            _ => stored.matrix_shape(),
        }
    }

    /// Returns the tensors that must exist. Quantized layers have a bias if their files have one.
    fn expected(&self, biased: &[Target]) -> Vec<TensorId> {
        let required: Vec<TensorId> = layout::required_tensors(&self.config, biased).collect();
        let is_stored = |id: &TensorId| {
            self.quantization.is_some() && self.shards.tensor(&self.place(*id).tensor).is_some()
        };
        let biases = (0..self.config.layers)
            .flat_map(|layer| {
                layer_targets(&self.config, layer).iter().map(move |&target| TensorId::Bias(layer, target))
            })
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
        // Experts and parts were checked when the files were opened.
        if let Some(experts) = self.interleaved(id) {
            return experts.tensor();
        }
        let place = self.place(id);
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
        if let Some(experts) = self.interleaved(id) {
            return experts.kind();
        }
        match self.parts(&self.place(id)).ok().flatten() {
            Some(parts) => Some(parts.kind()),
            None => self.tensor(id).map(|tensor| tensor.kind),
        }
    }

    fn release(&self, id: TensorId) {
        if let Some(experts) = self.interleaved(id) {
            return experts.names().iter().for_each(|name| self.shards.release(name));
        }
        let place = self.place(id);
        self.shards.release(&place.tensor);
        part_names(&place).for_each(|part| self.shards.release(&part));
    }

    fn unchanged(&self) -> bool {
        self.shards.unchanged()
    }
}

/// Returns the part names of the linear layer at `place`, if it can be quantized.
fn part_names(place: &TensorLocation) -> impl Iterator<Item = String> {
    let module = place.module();
    module.into_iter().flat_map(|module| PARTS.map(|part| format!("{module}.{part}")))
}

/// Reads `config.json` of a directory without parsing it, and returns its path too.
pub(crate) fn read_config(directory: &Path) -> Result<(PathBuf, Vec<u8>), SafetensorsSourceError> {
    let path = directory.join(CONFIG_FILE);
    match whole_file::read(&path, MAX_CONFIG_BYTES) {
        Ok(json) => Ok((path, json)),
        Err(source) => Err(SafetensorsSourceError::Read { path, source }),
    }
}
