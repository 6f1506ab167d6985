//! Opens the model: weights, forward pass, adapter loader and the facts that the engine needs.
//!
//! # Layout
//!
//! - this file: the opened model, and the preparation of adapters for it
//! - `base_device`: the steps of opening a base on any device
//! - [`cpu`], [`cuda`]: the base on the host's cores, and on a GPU
//! - [`footprint`]: the memory of a base and of adapters, from the model's header alone
//! - `drafting`: drafter models: the base's first layers, or a smaller model
//! - `base`: the source of the weights, and the plan of the layer service
//! - `precision_choice`: the precision of linear layers on a CPU

mod base;
mod base_device;
pub(crate) mod cpu;
pub(crate) mod cuda;
mod drafting;
pub(crate) mod footprint;
mod precision_choice;

use std::{fmt, path::Path, sync::Arc};

use kernels::{attention::KvPrecision, lora::LoraPrecision};
use model::{
    adapter::{Adapter, AdapterError, AnyAdapter, BiasedAdapter, DoraAdapter, DraftAdapter, limits},
    deltas::prepared::{EncodedAdapter, PreparedAdapter},
    forward::ForwardPass,
    precision::{BaseNumerics, Precision},
    resident::SharedBase,
    shape::config::ModelConfig,
};
use settings::{AdapterDtype, KvDtype};
use shmproto::message::DeviceFacts;

use self::drafting::Drafting;
pub(crate) use self::precision_choice::{PrecisionChoice, precision_of};
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

/// An opened model, ready for the engine.
pub struct OpenedModel<P: ForwardPass, L> {
    /// Forward pass, which owns weights and KV memory.
    pub pass: P,
    /// Loader of adapters for the pass.
    pub loader: L,
    pub placement: Box<dyn Placement<P::Adapter>>,
    /// Layer service for split clients, if it is on.
    pub layers: Option<LayerService<P>>,
    /// Host memory of the process, in use and allowed.
    pub budget: MemoryBudget,
    /// Drafter model, if one is set.
    pub draft_model: Option<DrafterFactory>,
    pub info: ModelInfo,
}

impl<P: ForwardPass, L> fmt::Debug for OpenedModel<P, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resident").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Properties of the model for the engine and the gateways.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    pub model_path: String,
    /// Content hash of the base's configuration, tensors and text files.
    pub base_hash: [u8; 32],
    /// Hash of tokenizer, chat template and sampling defaults.
    pub text_hash: [u8; 32],
    pub device: DeviceFacts,
    /// Data types and roundings beyond the base's own; a difference may change output bits.
    pub numbers: String,
    /// Maximum sequence length in tokens.
    pub context_length: usize,
    /// KV blocks that the pass has memory for.
    pub kv_blocks: u32,
}

/// Properties of a base whose linear layers are served without an engine.
pub(crate) struct LinearLayersInfo {
    pub(crate) architecture: String,
    pub(crate) identity: [u8; 32],
    pub(crate) numerics: BaseNumerics,
    pub(crate) bytes: usize,
}

/// Returns the element type of the KV cache that is set; `None` for `auto`.
pub(crate) fn kv_dtype(set: KvDtype) -> Option<KvPrecision> {
    match set {
        KvDtype::Auto => None,
        KvDtype::F32 => Some(KvPrecision::F32),
        KvDtype::F16 => Some(KvPrecision::F16),
        KvDtype::Bf16 => Some(KvPrecision::Bf16),
        KvDtype::Int8 => Some(KvPrecision::Int8),
    }
}

/// Returns the element type of the KV cache of a base with these `numerics`.
pub(crate) fn kv_precision(config: &ExecutorConfig, numerics: BaseNumerics) -> KvPrecision {
    numerics.kv(kv_dtype(config.kv_dtype))
}

/// Returns the precision of adapters of a base with these `numerics`.
pub(crate) fn adapter_precision(config: &ExecutorConfig, numerics: BaseNumerics) -> LoraPrecision {
    match config.adapter_dtype {
        AdapterDtype::Auto => numerics.adapters(),
        AdapterDtype::Exact => LoraPrecision::Exact,
        AdapterDtype::F16 => LoraPrecision::Compact,
        AdapterDtype::Bf16 => LoraPrecision::Bf16,
    }
}

/// Revision of the arithmetic; every change of the bits of logits raises this number. A receipt names the
/// revision that its answer was computed with.
const ARITHMETIC_REVISION: u32 = 1;

/// Returns [`ModelInfo::numbers`] of a base; a CPU computes its layers in `precision`.
fn numbers(config: &ExecutorConfig, precision: Option<Precision>, numerics: BaseNumerics) -> String {
    let activations =
        precision.map_or_else(|| "the device's".to_owned(), |precision| format!("{precision:?}"));
    let kv = kv_precision(config, numerics);
    // The words of `adapter_dtype`.
    let adapters = match adapter_precision(config, numerics) {
        LoraPrecision::Exact => AdapterDtype::Exact,
        LoraPrecision::Compact => AdapterDtype::F16,
        LoraPrecision::Bf16 => AdapterDtype::Bf16,
    };
    format!(
        "activations {activations}, keys and values {kv:?}, adapters {adapters}, revision {ARITHMETIC_REVISION}"
    )
    .to_lowercase()
}

/// Reads and prepares adapters for the resident model's shape.
#[derive(Debug, Clone)]
pub(crate) struct AdapterLoader {
    config: ModelConfig,
    precision: LoraPrecision,
    library: ImageRegistry,
    /// Configuration of draft adapters; `None` where drafting with the base is off.
    drafting: Option<Drafting>,
    /// Base weights in host memory, which DoRA needs; `None` without any.
    base: Option<SharedBase>,
    /// Whether the pass computes the deltas of experts.
    adapts_experts: bool,
}

impl AdapterLoader {
    /// Creates a loader for a base of this shape and these `numerics`.
    fn new(
        config: &ExecutorConfig,
        shape: &ModelConfig,
        numerics: BaseNumerics,
        library: &ImageRegistry,
        (drafting, base): (Option<Drafting>, Option<SharedBase>),
    ) -> Self {
        let (precision, library) = (adapter_precision(config, numerics), library.clone());
        Self { config: shape.clone(), precision, library, drafting, base, adapts_experts: false }
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

    /// Encodes an adapter with biases, which are added only where the base is in host memory.
    fn encode_biased(&self, biased: BiasedAdapter) -> Result<EncodedAdapter, PrepareError> {
        if self.base.is_none() {
            return Err(PrepareError::Invalid(anyhow::anyhow!(
                "it has biases, which are not computed on a GPU; merge it into the base, or use a base on the CPU"
            )));
        }
        Ok(self.encode(&biased.adapter).with_scales(biased.biases))
    }

    fn prepare_draft(&self, draft: &DraftAdapter) -> Result<PassReadyAdapter<PreparedAdapter>, PrepareError> {
        let layers = u32::try_from(draft.shape.layers).unwrap_or(u32::MAX);
        let (adapter, factory) = match &self.drafting {
            Some(drafting) => {
                let (adapter, factory) = drafting.by_itself(draft)?;
                (adapter, Some(factory))
            }
            None => {
                tracing::warn!("a draft adapter is loaded but not used; see --draft and --device");
                let adapter = PreparedAdapter::new(&draft.adapter, &self.config, self.precision);
                (Arc::new(adapter.map_err(|error| PrepareError::Invalid(error.into()))?), None)
            }
        };
        let bytes = adapter.bytes() as u64;
        Ok(PassReadyAdapter { adapter, bytes, role: AdapterRole::Drafts { layers, factory } })
    }
}

impl Loader for AdapterLoader {
    type Adapter = PreparedAdapter;

    fn foreseeable_bytes(&self, path: &Path) -> u64 {
        let weights = if path.is_dir() { path.join("adapter_model.safetensors") } else { path.to_owned() };
        let stored = std::fs::metadata(weights).map_or(0, |file| file.len());
        // A stored 32-bit value may be kept in 16 bits.
        stored.saturating_sub(limits::MAX_HEADER_BYTES) / 2
    }

    fn read(&self, path: &Path) -> anyhow::Result<(AnyAdapter, Vec<String>)> {
        let (adapter, notes) = AnyAdapter::read_with_notes(path, &self.config)?;
        for note in &notes {
            tracing::info!(path = %path.display(), %note, "a note on an adapter's files");
        }
        Ok((adapter, notes.iter().map(ToString::to_string).collect()))
    }

    fn prepare(&self, adapter: AnyAdapter) -> Result<PassReadyAdapter<PreparedAdapter>, PrepareError> {
        if !self.adapts_experts && adapter.adapter().changes_experts() {
            return Err(PrepareError::Invalid(AdapterError::NoExperts { place: "a GPU" }.into()));
        }
        let head = adapter.classification_head().cloned();
        let encoded = match adapter {
            AnyAdapter::Answers(adapter) => self.encode(&adapter),
            AnyAdapter::Decomposed(dora) => self.encode_dora(&dora)?,
            AnyAdapter::Vocabulary(it) => self.encode(&it.adapter).with_vocabulary(it.changes),
            AnyAdapter::Classifies(it) => self.encode(&it.adapter),
            AnyAdapter::Biased(it) => self.encode_biased(it)?,
            AnyAdapter::Drafts(draft) => return self.prepare_draft(&draft),
        };
        let prepared = publish(encoded, &self.config, &self.library).map_err(|error| match error {
            PublishError::Overflow(_) => PrepareError::Invalid(error.into()),
            error => PrepareError::NoRoom(error.into()),
        })?;
        let bytes = (prepared.bytes() + head.as_ref().map_or(0, |head| head.bytes())) as u64;
        let role = head.map_or(AdapterRole::Answers, AdapterRole::Classifies);
        Ok(PassReadyAdapter { adapter: prepared, bytes, role })
    }
}

#[cfg(test)]
mod tests {
    use model::sources::open::open;
    use testkit::paths::golden;

    use super::*;

    #[test]
    fn adapters_of_experts_are_refused_by_name_where_no_pass_computes_them() {
        let source = open(&golden("models/mixtral")).unwrap();
        let read = || {
            let path = golden("adapters/experts/mixtral/both");
            AnyAdapter::read(&path, source.config()).unwrap()
        };
        let (config, library) = (source.config().clone(), ImageRegistry::new().unwrap());
        let precision = LoraPrecision::Exact;
        let loader =
            AdapterLoader { config, precision, library, drafting: None, base: None, adapts_experts: false };
        let Err(PrepareError::Invalid(error)) = loader.prepare(read()) else { panic!("it is loaded") };
        assert!(error.to_string().contains("experts, which a GPU cannot compute"), "{error}");
        let loader = AdapterLoader { adapts_experts: true, ..loader };
        let Ok(ready) = loader.prepare(read()) else { panic!("it is refused") };
        // Two layers of attention in two blocks go to the device, at 4 bytes and rank 4.
        assert_eq!(ready.adapter.device_bytes(), 2 * 2 * 4 * 4 * (64 + 64));
        let of_experts = 2 * 4 * 4 * 4 * ((64 + 128) + (64 + 64));
        assert_eq!(ready.bytes, (ready.adapter.device_bytes() + of_experts) as u64);
    }
}
