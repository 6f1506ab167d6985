//! Where the weights come from, until they are loaded, and what of them is lent to split clients.

use std::path::PathBuf;

use kernels::{TensorType, lora::LoraPrecision};
use model::{
    config::ModelConfig,
    forward::ForwardPass,
    layout::BLOCK_TARGETS,
    location::{HubSettings, resolve},
    random_source::RandomSource,
    sites::EvaluateSites,
    skeleton::SkeletonPlan,
    source::{TensorId, WeightSource},
};

use shmproto::message::DeviceFacts;

use super::{Facts, kv_numbers, precision};
use crate::{
    config::Config,
    engine::company::Tenancy,
    layers::{
        settings::LayerSettings,
        start::{BaseFacts, Places, name_of, start},
    },
    process,
};

/// A base that is about to be loaded.
pub(super) struct Base {
    /// Path of the model file or directory.
    pub(super) path: PathBuf,
    /// Its weights.
    pub(super) source: Box<dyn WeightSource + Send + Sync>,
    /// Cores to compute on, or to load with.
    pub(super) cores: Vec<usize>,
    /// What tells it from others, if that takes no reading.
    identity: Option<[u8; 32]>,
    plan: Option<SkeletonPlan>,
}

/// A base whose weights are loaded.
pub(super) struct Loaded {
    pub(super) path: PathBuf,
    pub(super) base_hash: [u8; 32],
    pub(super) cores: Vec<usize>,
    plan: Option<SkeletonPlan>,
}

impl Base {
    /// Opens what `config` names.
    ///
    /// # Errors
    /// If it is no model, or one that cannot be run.
    pub(super) fn open(config: &Config) -> anyhow::Result<Self> {
        let path = resolve(&config.model, &HubSettings::from_env())?;
        let cores = match &config.cores {
            Some(cores) => cores.0.clone(),
            None => process::allowed_cores()?,
        };
        if let Some(seed) = config.random_weights {
            let source = RandomSource::open(&path, seed)?;
            tracing::warn!(seed, "the weights are made of a number: answers mean nothing");
            let (identity, source) = (Some(source.identity()), Box::new(source));
            return Ok(Self { path, source, cores, identity, plan: None });
        }
        // Before the weights, so that a model put in its place meanwhile is noticed.
        let plan = config.layer_socket().map(|_| SkeletonPlan::of(&path)).transpose();
        let source = model::open::open(&path).map_err(|error| match error.is_of_configuration() {
            true => anyhow::Error::new(error).context("split clients could run it with --engine none"),
            false => error.into(),
        })?;
        Ok(Self { path, source, cores, identity: None, plan: plan? })
    }

    /// What is told while the weights are loaded.
    pub(super) fn stage(&self) -> &'static str {
        if self.identity.is_some() { "making weights" } else { "reading weights" }
    }

    /// Whether its linear layers are of 32 bits, so that nothing beside them is rounded.
    pub(super) fn is_exact(&self) -> bool {
        let layers = 0..self.source.config().layers;
        let ids = layers.flat_map(|layer| BLOCK_TARGETS.map(|target| TensorId::Weight(layer, target)));
        ids.filter_map(|id| self.source.kind(id)).all(|kind| kind == TensorType::F32)
    }

    /// From here on nothing reads the files any more: they may be replaced, cut or deleted.
    ///
    /// # Errors
    /// If a file was written to meanwhile.
    pub(super) fn close(self) -> anyhow::Result<Loaded> {
        let Self { path, source, cores, identity, plan } = self;
        let base_hash = identity.unwrap_or_else(|| model::identity::of_base(&*source));
        anyhow::ensure!(
            source.unchanged() && plan.as_ref().is_none_or(SkeletonPlan::is_current),
            "{} was written to while it was loaded, so its weights cannot be trusted; start again once it is whole, and \
             replace model files by renaming",
            path.display()
        );
        Ok(Loaded { path, base_hash, cores, plan })
    }
}

impl Loaded {
    /// What gateways are told of it, on `device`, with so many KV blocks.
    pub(super) fn facts(&self, device: DeviceFacts, shape: &ModelConfig, kv_blocks: u32) -> Facts {
        let (model_path, base_hash) = (self.path.display().to_string(), self.base_hash);
        Facts { model_path, base_hash, device, context_length: shape.context_length, kv_blocks }
    }

    /// The base on loan, if it is lent: of this shape, beside adapters of the precision that suits it.
    pub(super) fn lend(
        &mut self,
        config: &Config,
        shape: &ModelConfig,
        suits: LoraPrecision,
    ) -> Option<Loan> {
        let (socket, plan) = config.layer_socket().zip(self.plan.take())?;
        let base = BaseFacts {
            model: name_of(&config.model),
            architecture: shape.architecture.clone(),
            base_hash: self.base_hash,
            context_length: shape.context_length,
            kv: kv_numbers(config, suits),
            adapters: precision(config, suits),
            plan,
        };
        Some(Loan { settings: config.layers.settings(), places: Places::of(&config.layers, socket), base })
    }
}

/// The base on loan: what split clients are served, and where.
pub(super) struct Loan {
    settings: LayerSettings,
    places: Places,
    base: BaseFacts,
}

impl Loan {
    /// Opens the doors.
    pub(super) fn begin<P: ForwardPass + EvaluateSites>(self, pass: &P) -> anyhow::Result<Tenancy<P>> {
        let (hub, doors) = start(self.settings, self.places, pass.sites(), self.base)?;
        Ok(Tenancy { hub, base: |pass| pass, doors: Some(doors) })
    }
}
