//! The real model behind the engine: opens the weights and says what the engine needs to know of them.
//!
//! # Layout
//!
//! - this file: what every device's way of opening has in common
//! - [`cpu`], [`cuda`]: the base on the host's own cores, and on a GPU
//! - `base`: where the weights come from, and what lends them to split clients

mod base;
pub mod cpu;
pub mod cuda;

use std::{fmt, path::Path, sync::Arc};

use anyhow::Context as _;
use cache::copy::BytesPerSecond;
use kernels::{attention::KvPrecision, lora::LoraPrecision};
use model::{
    adapter::{Adapter, limits},
    config::ModelConfig,
    device_copy::DeviceMemory,
    forward::ForwardPass,
    prepared_adapter::{EncodedAdapter, PreparedAdapter},
    resident::{KvDtype, kv_precision},
};
use shmproto::message::{ColdStart, DeviceFacts};

use crate::{
    config::{self, AdapterDtype, Config},
    costs::Costs,
    device::{Arrivals, Device, DeviceSettings, FreeBytes},
    engine::company::Tenancy,
    images::{Library, shelve},
    loader::Loader,
    placement::Placement,
    progress::Progress,
    workers::Workers,
};

/// What the process serves.
pub struct Resident<P: ForwardPass, L> {
    /// The forward pass, which owns weights and KV memory.
    pub pass: P,
    /// Brings adapters into the form the pass takes.
    pub loader: L,
    /// Which adapters the device holds.
    pub placement: Box<dyn Placement<P::Adapter>>,
    /// Split clients that the base is lent to.
    pub tenancy: Option<Tenancy<P>>,
    /// What gateways are told.
    pub facts: Facts,
}

impl<P: ForwardPass, L> fmt::Debug for Resident<P, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resident").field("facts", &self.facts).finish_non_exhaustive()
    }
}

/// What the engine and the gateways need to know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Path of the model file or directory.
    pub model_path: String,
    /// Content identity of the base: hash of its configuration and tensor table.
    pub base_hash: [u8; 32],
    /// What it is computed on.
    pub device: DeviceFacts,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// KV blocks the pass has memory for.
    pub kv_blocks: u32,
}

/// How adapters come to a device, and what there is to say of it.
struct Platform {
    settings: DeviceSettings,
    memory: DeviceMemory,
    free: FreeBytes,
    arrivals: Arrivals,
    workers: Workers,
    costs: Option<Costs>,
}

impl Platform {
    /// The device tier.
    fn placement(self) -> anyhow::Result<Box<Device>> {
        let Self { settings, memory, free, arrivals, workers, costs } = self;
        let device = Device::new(settings, arrivals, workers, costs);
        let device = device.context("cannot start the thread that copies adapters")?;
        Ok(Box::new(device.with_memory(memory, free)))
    }
}

fn device_settings(config: &Config) -> DeviceSettings {
    let link = config.link_bytes_per_s().map(BytesPerSecond);
    if let Some(link) = link {
        tracing::warn!(
            bytes_per_s = link.get(),
            "the link to the device is emulated: an experiment, not a service"
        );
    }
    DeviceSettings { bytes: config.device_adapter_bytes.0, cold_start: config.cold_start.into(), link }
}

/// Times the pass, if there are cold starts to be decided on.
fn costs<P: ForwardPass>(
    settings: &DeviceSettings,
    pass: &mut P,
    shape: &ModelConfig,
    cores: &[usize],
    kv_blocks: u32,
    progress: &Progress,
) -> anyhow::Result<Option<Costs>> {
    match settings.cold_start {
        ColdStart::CpuAssist => {
            progress.stage("measuring what cold starts cost");
            Ok(Some(Costs::measure(pass, shape, cores, kv_blocks, settings.link)?))
        }
        ColdStart::OnDemand | ColdStart::Cached => Ok(None),
    }
}

/// Blocks of the pool, of which there must be one.
fn some_blocks(kv_blocks: usize) -> anyhow::Result<u32> {
    anyhow::ensure!(kv_blocks > 0, "--kv-bytes does not hold a single KV block; raise it");
    Ok(u32::try_from(kv_blocks).unwrap_or(u32::MAX))
}

fn kv_dtype(config: &Config) -> KvDtype {
    match config.kv_dtype {
        config::KvDtype::Auto => KvDtype::Auto,
        config::KvDtype::F32 => KvDtype::F32,
        config::KvDtype::F16 => KvDtype::F16,
    }
}

/// What keys and values are beside adapters of the precision that suits the weights.
pub(crate) fn kv_numbers(config: &Config, suits: LoraPrecision) -> KvPrecision {
    kv_precision(suits == LoraPrecision::Exact, kv_dtype(config))
}

/// How adapters are kept; `suitable` is what suits the weights.
pub(crate) fn precision(config: &Config, suitable: LoraPrecision) -> LoraPrecision {
    match config.adapter_dtype {
        AdapterDtype::Auto => suitable,
        AdapterDtype::Exact => LoraPrecision::Exact,
        AdapterDtype::F16 => LoraPrecision::Compact,
        AdapterDtype::Bf16 => LoraPrecision::Bf16,
    }
}

/// Reads adapters against the shape of the resident model.
#[derive(Debug, Clone)]
pub struct AdapterLoader {
    config: ModelConfig,
    precision: LoraPrecision,
    library: Library,
}

impl AdapterLoader {
    /// For a base of this shape, beside adapters of the precision that suits it.
    fn new(config: &Config, shape: &ModelConfig, suits: LoraPrecision, library: &Library) -> Self {
        let (precision, library) = (precision(config, suits), library.clone());
        Self { config: shape.clone(), precision, library }
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

    fn read(&self, path: &Path) -> anyhow::Result<Adapter> {
        Ok(Adapter::read(path, &self.config)?)
    }

    fn prepare(&self, adapter: Adapter) -> anyhow::Result<(Arc<PreparedAdapter>, u64)> {
        let encoded = EncodedAdapter::new(&adapter, &self.config, self.precision);
        drop(adapter);
        let prepared = shelve(encoded, &self.config, &self.library)?;
        let bytes = prepared.bytes() as u64;
        Ok((prepared, bytes))
    }
}
