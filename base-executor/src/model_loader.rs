//! The real model behind the engine: opens the weights and says what the engine needs to know of them.
//!
//! # Layout
//!
//! - this file: what is served, and how adapters are read for it
//! - `base_device`: the script by which a base is opened on any device
//! - [`cpu`], [`cuda`]: the base on the host's own cores, and on a GPU
//! - `drafting`: drafts that are models, over its first layers or beside it
//! - `base`: where the weights come from, and what lends them to split clients

mod base;
mod base_device;
pub mod cpu;
pub mod cuda;
mod drafting;

use std::{fmt, path::Path, sync::Arc};

use kernels::{attention::KvPrecision, lora::LoraPrecision};
use model::{
    adapter::{Adapter, AnyAdapter, DoraAdapter, DraftAdapter, limits},
    deltas::prepared::{EncodedAdapter, PreparedAdapter},
    forward::ForwardPass,
    precision::Precision,
    resident::{KvDtype, SharedBase, kv_precision},
    shape::config::ModelConfig,
};
use settings::{AdapterDtype, DeviceChoice};
use shmproto::message::DeviceFacts;

use self::drafting::Drafting;
use crate::{
    adapter_images::{ImageRegistry, PublishError, publish},
    adapters::AdapterRole,
    budget::MemoryBudget,
    config::ExecutorConfig,
    drafter::DrafterFactory,
    engine::layers::LayerService,
    loader::{Loader, PassReadyAdapter, PrepareError},
    placement::Placement,
};

/// What the process serves.
pub struct OpenedModel<P: ForwardPass, L> {
    /// The forward pass, which owns weights and KV memory.
    pub pass: P,
    /// Brings adapters into the form the pass takes.
    pub loader: L,
    /// Which adapters the device holds.
    pub placement: Box<dyn Placement<P::Adapter>>,
    /// Split clients that the base is lent to.
    pub layers: Option<LayerService<P>>,
    /// What it holds, and may hold, in the host's memory.
    pub budget: MemoryBudget,
    /// A smaller model that drafts, if one was asked for.
    pub draft_model: Option<DrafterFactory>,
    /// What gateways are told.
    pub facts: ModelFacts,
}

impl<P: ForwardPass, L> fmt::Debug for OpenedModel<P, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resident").field("facts", &self.facts).finish_non_exhaustive()
    }
}

/// What the engine and the gateways need to know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFacts {
    /// Path of the model file or directory.
    pub model_path: String,
    /// Content identity of the base: hash of its configuration, its tensors and what its text is made of.
    pub base_hash: [u8; 32],
    /// Hash of what tokenizer, chat template and sampling defaults are made of.
    pub text_hash: [u8; 32],
    /// What it is computed on.
    pub device: DeviceFacts,
    /// How numbers are rounded and kept that a base does not decide: where they differ, so do bits.
    pub numbers: String,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// KV blocks the pass has memory for.
    pub kv_blocks: u32,
}

/// What the host's cores compute with.
pub(crate) fn rounding(asked: settings::Precision) -> Precision {
    match asked {
        settings::Precision::Auto => Precision::default(),
        settings::Precision::Int8 => Precision::Int8,
        settings::Precision::Mixed => Precision::Mixed,
        settings::Precision::Int15 => Precision::Int15,
        settings::Precision::Exact => Precision::Exact,
    }
}

/// How keys and values are to be kept.
pub(crate) fn kv_dtype(asked: settings::KvDtype) -> KvDtype {
    match asked {
        settings::KvDtype::Auto => KvDtype::Auto,
        settings::KvDtype::F32 => KvDtype::F32,
        settings::KvDtype::F16 => KvDtype::F16,
        settings::KvDtype::Int8 => KvDtype::Int8,
    }
}

/// What keys and values are beside adapters of the precision that suits the weights.
pub(crate) fn kv_numbers(config: &ExecutorConfig, suits: LoraPrecision) -> KvPrecision {
    kv_precision(suits == LoraPrecision::Exact, kv_dtype(config.kv_dtype))
}

/// How adapters are kept; `suitable` is what suits the weights.
pub(crate) fn precision(config: &ExecutorConfig, suitable: LoraPrecision) -> LoraPrecision {
    match config.adapter_dtype {
        AdapterDtype::Auto => suitable,
        AdapterDtype::Exact => LoraPrecision::Exact,
        AdapterDtype::F16 => LoraPrecision::Compact,
        AdapterDtype::Bf16 => LoraPrecision::Bf16,
    }
}

/// What [`ModelFacts::numbers`] says beside adapters of the precision that suits the weights.
fn numbers(config: &ExecutorConfig, suits: LoraPrecision) -> String {
    let activations = match config.device {
        DeviceChoice::Cpu => format!("{:?}", rounding(config.precision)),
        DeviceChoice::Cuda { .. } => "the device's".to_owned(),
    };
    let (kv, adapters) = (kv_numbers(config, suits), precision(config, suits));
    format!("activations {activations}, keys and values {kv:?}, adapters {adapters:?}").to_lowercase()
}

/// Reads adapters against the shape of the resident model.
#[derive(Debug, Clone)]
pub struct AdapterLoader {
    config: ModelConfig,
    precision: LoraPrecision,
    library: ImageRegistry,
    /// What drafts are computed with; `None` where none drafts.
    drafting: Option<Drafting>,
    /// What of the base is in the host's memory, which a DoRA has to meet; `None` where nothing is.
    base: Option<SharedBase>,
}

impl AdapterLoader {
    /// For a base of this shape, beside adapters of the precision that suits it.
    fn new(
        config: &ExecutorConfig,
        shape: &ModelConfig,
        suits: LoraPrecision,
        library: &ImageRegistry,
        (drafting, base): (Option<Drafting>, Option<SharedBase>),
    ) -> Self {
        let (precision, library) = (precision(config, suits), library.clone());
        Self { config: shape.clone(), precision, library, drafting, base }
    }

    fn encode(&self, adapter: &Adapter) -> EncodedAdapter {
        EncodedAdapter::new(adapter, &self.config, self.precision)
    }

    fn encode_dora(&self, dora: &DoraAdapter) -> Result<EncodedAdapter, PrepareError> {
        let layer = |layer, target| self.base.as_ref()?.linear_layer(layer, target);
        let over = dora.over(&self.config, layer);
        let (adapter, scales) = over.map_err(|error| PrepareError::Invalid(error.into()))?;
        Ok(self.encode(&adapter).with_scales(scales))
    }

    fn prepare_draft(&self, draft: &DraftAdapter) -> Result<PassReadyAdapter<PreparedAdapter>, PrepareError> {
        let layers = u32::try_from(draft.shape.layers).unwrap_or(u32::MAX);
        let (adapter, agency) = match &self.drafting {
            Some(drafting) => {
                let (adapter, agency) = drafting.by_itself(draft)?;
                (adapter, Some(agency))
            }
            None => {
                tracing::warn!("a draft adapter is held that nobody drafts by: see --draft and --device");
                let adapter = PreparedAdapter::new(&draft.adapter, &self.config, self.precision);
                (Arc::new(adapter.map_err(|error| PrepareError::Invalid(error.into()))?), None)
            }
        };
        let bytes = adapter.bytes() as u64;
        Ok(PassReadyAdapter { adapter, bytes, role: AdapterRole::Drafts { layers, agency } })
    }
}

impl Loader for AdapterLoader {
    type Adapter = PreparedAdapter;

    fn foreseeable_bytes(&self, path: &Path) -> u64 {
        let weights = if path.is_dir() { path.join("adapter_model.safetensors") } else { path.to_owned() };
        let stored = std::fs::metadata(weights).map_or(0, |file| file.len());
        // Of 32 bits a number 16 may be kept.
        stored.saturating_sub(limits::MAX_HEADER_BYTES) / 2
    }

    fn read(&self, path: &Path) -> anyhow::Result<AnyAdapter> {
        let (adapter, notes) = AnyAdapter::read_with_notes(path, &self.config)?;
        for note in notes {
            tracing::info!(path = %path.display(), %note, "something in an adapter's files has no effect");
        }
        Ok(adapter)
    }

    fn prepare(&self, adapter: AnyAdapter) -> Result<PassReadyAdapter<PreparedAdapter>, PrepareError> {
        let encoded = match adapter {
            AnyAdapter::Answers(adapter) => self.encode(&adapter),
            AnyAdapter::Decomposed(dora) => self.encode_dora(&dora)?,
            AnyAdapter::Vocabulary(it) => self.encode(&it.adapter).with_vocabulary(it.changes),
            AnyAdapter::Drafts(draft) => return self.prepare_draft(&draft),
        };
        let prepared = publish(encoded, &self.config, &self.library).map_err(|error| match error {
            PublishError::Overflow(_) => PrepareError::Invalid(error.into()),
            error => PrepareError::NoRoom(error.into()),
        })?;
        let bytes = prepared.bytes() as u64;
        Ok(PassReadyAdapter { adapter: prepared, bytes, role: AdapterRole::Answers })
    }
}
