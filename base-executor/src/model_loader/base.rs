//! The source of the weights until they are loaded, and the plan of the layer service.

use std::path::{Path, PathBuf};

use kernels::TensorType;
use kv_cache::ledger::MemoryAccount;
use layer_service::{
    settings::LayerSettings,
    start::{CatalogInfo, ListenAddresses, name_of, start},
};
use model::{
    client_weights::ClientWeightsPlan,
    forward::ForwardPass,
    linear_sites::EvaluateSites,
    precision::BaseNumerics,
    shape::{
        config::ModelConfig,
        identity::{HasIdentity, HashedWeights},
        layout::block_weights,
    },
    sources::{open::OpenError, random::RandomSource},
};
use model_files::{
    location::{hub_cache, resolve},
    model_files::ModelFiles,
    text_hash::TextHash,
};

use shmproto::message::DeviceFacts;

use super::{ModelInfo, adapter_precision, kv_precision};
use crate::{config::ExecutorConfig, engine::layers::LayerService};

pub(super) struct PendingBase {
    pub(super) path: PathBuf,
    pub(super) source: Box<dyn HasIdentity + Send + Sync>,
    /// Cores to compute on, or to load with.
    pub(super) cores: Vec<usize>,
    /// Progress stage while the weights load.
    pub(super) stage: &'static str,
    /// Hash of the text files before the weights were opened.
    text: TextHash,
    plan: Option<ClientWeightsPlan>,
}

pub(super) struct LoadedBase {
    pub(super) path: PathBuf,
    pub(super) base_hash: [u8; 32],
    text: TextHash,
    pub(super) cores: Vec<usize>,
    plan: Option<ClientWeightsPlan>,
}

impl PendingBase {
    /// Opens the model that `config` names.
    ///
    /// # Errors
    /// If there is no model, or it cannot be run.
    pub(super) fn open(config: &ExecutorConfig) -> anyhow::Result<Self> {
        let path = resolve(&config.model, &hub_cache())?;
        let cores = match config.own_cores() {
            Some(cores) => cores.0.iter().map(|&core| core as usize).collect(),
            None => process::allowed_cores()?,
        };
        // Hashed before the weights, so that a model replaced meanwhile is detected.
        let text = text_of(&path)?;
        if let Some(seed) = config.random_weights {
            let source = Box::new(RandomSource::open(&path, seed)?);
            tracing::warn!(seed, "the weights are random; answers are meaningless");
            return Ok(Self { path, source, cores, stage: "making weights", text, plan: None });
        }
        let plan = config.layer_socket().map(|_| ClientWeightsPlan::of(&path)).transpose();
        let source =
            model::sources::open::open(&path).map_err(|error| match error.is_of_configuration() {
                true => anyhow::Error::new(error)
                    .context("with --engine none, split clients could run this model"),
                false => error.into(),
            })?;
        let source = Box::new(HashedWeights::new(source));
        Ok(Self { path, source, cores, stage: "reading weights", text, plan: plan? })
    }

    /// Returns the base's identity hash. Reads all tensors that were not read yet.
    pub(super) fn identity(&self) -> [u8; 32] {
        self.source.identity(self.text)
    }

    /// Returns the rounding of the layers on a GPU, where only 32-bit weights leave all values unrounded.
    pub(super) fn numerics_on_gpu(&self) -> BaseNumerics {
        let config = self.source.config();
        let ids = (0..config.layers).flat_map(|layer| block_weights(config, layer));
        let are_exact = ids.filter_map(|id| self.source.kind(id)).all(|kind| kind == TensorType::F32);
        if are_exact { BaseNumerics::Exact } else { BaseNumerics::Rounded }
    }

    /// Closes the files, which may then be replaced, truncated or deleted.
    ///
    /// # Errors
    /// If a file changed since it was opened.
    pub(super) fn close(self) -> anyhow::Result<LoadedBase> {
        let Self { path, source, cores, text, plan, .. } = self;
        let base_hash = source.identity(text);
        let text_stayed = text_of(&path).is_ok_and(|now| now == text);
        anyhow::ensure!(
            text_stayed && source.unchanged() && plan.as_ref().is_none_or(ClientWeightsPlan::is_current),
            "{} was written while it was loaded, so its weights may be wrong; start again when the file \
             is complete, and replace model files by renaming",
            path.display()
        );
        Ok(LoadedBase { path, base_hash, text, cores, plan })
    }
}

/// Hashes the text files of the model at `path`; the weights may be elsewhere, or random.
fn text_of(path: &Path) -> Result<TextHash, OpenError> {
    Ok(TextHash::of(&ModelFiles::text_at(path)?)?)
}

impl LoadedBase {
    pub(super) fn model_info(
        &self,
        device: DeviceFacts,
        numbers: String,
        shape: &ModelConfig,
        kv_blocks: u32,
    ) -> ModelInfo {
        let context_length = shape.context_length;
        // Gateways may have another working directory.
        let path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        let (model_path, base_hash) = (path.display().to_string(), self.base_hash);
        ModelInfo {
            model_path,
            base_hash,
            text_hash: self.text.0,
            device,
            numbers,
            context_length,
            kv_blocks,
        }
    }

    /// Returns the plan of the layer service, if it is on.
    pub(super) fn layer_plan(
        &mut self,
        config: &ExecutorConfig,
        shape: &ModelConfig,
        numerics: BaseNumerics,
    ) -> Option<LayerPlan> {
        let (places, plan) = config.layer_places().zip(self.plan.take())?;
        let base = CatalogInfo {
            model: name_of(&config.model),
            architecture: shape.architecture.clone(),
            base_hash: self.base_hash,
            context_length: shape.context_length,
            kv: kv_precision(config, numerics),
            adapters: adapter_precision(config, numerics),
            plan,
        };
        Some(LayerPlan { settings: config.layers.settings(), places, base })
    }
}

pub(super) struct LayerPlan {
    settings: LayerSettings,
    places: ListenAddresses,
    base: CatalogInfo,
}

impl LayerPlan {
    /// Starts the layer service; memory held for clients is charged to `memory`.
    pub(super) fn open<P: ForwardPass + EvaluateSites>(
        self,
        pass: &P,
        memory: MemoryAccount,
    ) -> anyhow::Result<LayerService<P>> {
        let (dispatcher, servers) = start(self.settings, self.places, pass, self.base, memory)?;
        Ok(LayerService { dispatcher, base: |pass| pass, servers: Some(servers) })
    }
}
