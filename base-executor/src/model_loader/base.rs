//! Where the weights come from, until they are loaded, and what of them is lent to split clients.

use std::path::{Path, PathBuf};

use kernels::{TensorType, lora::LoraPrecision};
use kv_cache::ledger::MemoryAccount;
use layer_service::{
    settings::LayerSettings,
    start::{BaseFacts, ListenAddresses, name_of, start},
};
use model::{
    client_weights::ClientWeightsPlan,
    forward::ForwardPass,
    linear_sites::EvaluateSites,
    shape::{
        config::ModelConfig,
        identity::{HashedWeights, Identified},
        layout::block_weights,
    },
    sources::{open::OpenError, random::RandomSource},
};
use model_files::{
    location::{HubSettings, resolve},
    model_files::ModelFiles,
    text_hash::TextHash,
};

use shmproto::message::DeviceFacts;

use super::{ModelFacts, kv_numbers, precision};
use crate::{config::ExecutorConfig, engine::layers::LayerService, process};

/// A base that is about to be loaded.
pub(super) struct PendingBase {
    /// Path of the model file or directory.
    pub(super) path: PathBuf,
    /// Its weights.
    pub(super) source: Box<dyn Identified + Send + Sync>,
    /// Cores to compute on, or to load with.
    pub(super) cores: Vec<usize>,
    /// What is told while the weights are loaded.
    pub(super) stage: &'static str,
    /// What its text was made of before its weights were opened.
    text: TextHash,
    plan: Option<ClientWeightsPlan>,
}

/// A base whose weights are loaded.
pub(super) struct LoadedBase {
    pub(super) path: PathBuf,
    pub(super) base_hash: [u8; 32],
    text: TextHash,
    pub(super) cores: Vec<usize>,
    plan: Option<ClientWeightsPlan>,
}

impl PendingBase {
    /// Opens what `config` names.
    ///
    /// # Errors
    /// If it is no model, or one that cannot be run.
    pub(super) fn open(config: &ExecutorConfig) -> anyhow::Result<Self> {
        let path = resolve(&config.model, &HubSettings::from_env())?;
        let cores = match &config.cores {
            Some(cores) => cores.0.iter().map(|&core| core as usize).collect(),
            None => process::allowed_cores()?,
        };
        // Before the weights, like the plan, so that a model put in its place meanwhile is noticed.
        let text = text_of(&path)?;
        if let Some(seed) = config.random_weights {
            let source = Box::new(RandomSource::open(&path, seed)?);
            tracing::warn!(seed, "the weights are made of a number: answers mean nothing");
            return Ok(Self { path, source, cores, stage: "making weights", text, plan: None });
        }
        let plan = config.layer_socket().map(|_| ClientWeightsPlan::of(&path)).transpose();
        let source =
            model::sources::open::open(&path).map_err(|error| match error.is_of_configuration() {
                true => anyhow::Error::new(error).context("split clients could run it with --engine none"),
                false => error.into(),
            })?;
        let source = Box::new(HashedWeights::new(source));
        Ok(Self { path, source, cores, stage: "reading weights", text, plan: plan? })
    }

    /// What tells it from others. Reads all of it that was not read yet.
    pub(super) fn identity(&self) -> [u8; 32] {
        self.source.identity(self.text)
    }

    /// Whether its linear layers are of 32 bits, so that nothing beside them is rounded.
    pub(super) fn is_exact(&self) -> bool {
        let config = self.source.config();
        let ids = (0..config.layers).flat_map(|layer| block_weights(config, layer));
        ids.filter_map(|id| self.source.kind(id)).all(|kind| kind == TensorType::F32)
    }

    /// From here on nothing reads the files any more: they may be replaced, cut or deleted.
    ///
    /// # Errors
    /// If a file was written to meanwhile.
    pub(super) fn close(self) -> anyhow::Result<LoadedBase> {
        let Self { path, source, cores, text, plan, .. } = self;
        let base_hash = source.identity(text);
        let text_stayed = text_of(&path).is_ok_and(|now| now == text);
        anyhow::ensure!(
            text_stayed && source.unchanged() && plan.as_ref().is_none_or(ClientWeightsPlan::is_current),
            "{} was written to while it was loaded, so its weights cannot be trusted; start again once it is whole, and \
             replace model files by renaming",
            path.display()
        );
        Ok(LoadedBase { path, base_hash, text, cores, plan })
    }
}

/// What the text of the model at `path` is made of; weights may be elsewhere, or made.
fn text_of(path: &Path) -> Result<TextHash, OpenError> {
    Ok(TextHash::of(&ModelFiles::text_at(path)?)?)
}

impl LoadedBase {
    /// What gateways are told of it, on `device`, with so many KV blocks.
    pub(super) fn facts(
        &self,
        device: DeviceFacts,
        numbers: String,
        shape: &ModelConfig,
        kv_blocks: u32,
    ) -> ModelFacts {
        let context_length = shape.context_length;
        // Gateways may run somewhere else.
        let path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        let (model_path, base_hash) = (path.display().to_string(), self.base_hash);
        ModelFacts {
            model_path,
            base_hash,
            text_hash: self.text.0,
            device,
            numbers,
            context_length,
            kv_blocks,
        }
    }

    /// What split clients are to be served, if they are: a base of this shape, beside adapters of the precision that suits it.
    pub(super) fn layer_plan(
        &mut self,
        config: &ExecutorConfig,
        shape: &ModelConfig,
        suits: LoraPrecision,
    ) -> Option<LayerPlan> {
        let (places, plan) = config.layer_places().zip(self.plan.take())?;
        let base = BaseFacts {
            model: name_of(&config.model),
            architecture: shape.architecture.clone(),
            base_hash: self.base_hash,
            context_length: shape.context_length,
            kv: kv_numbers(config, suits),
            adapters: precision(config, suits),
            plan,
        };
        Some(LayerPlan { settings: config.layers.settings(), places, base })
    }
}

/// What split clients are to be served, and where.
pub(super) struct LayerPlan {
    settings: LayerSettings,
    places: ListenAddresses,
    base: BaseFacts,
}

impl LayerPlan {
    /// Opens the doors; what clients make the process hold is charged to `memory`.
    pub(super) fn open<P: ForwardPass + EvaluateSites>(
        self,
        pass: &P,
        memory: MemoryAccount,
    ) -> anyhow::Result<LayerService<P>> {
        let (hub, doors) = start(self.settings, self.places, pass, self.base, memory)?;
        Ok(LayerService { hub, base: |pass| pass, doors: Some(doors) })
    }
}
