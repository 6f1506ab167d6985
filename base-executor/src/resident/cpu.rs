//! The base on the host's own cores.

use std::{fs, sync::Arc};

use anyhow::Context as _;
use kernels::lora::LoraPrecision;
use model::{
    deltas::device_copy::DeviceMemory,
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    shape::config::ModelConfig,
    weights::LoadProgress,
};
use shmproto::message::{DeviceFacts, DeviceKind};

use super::{
    AdapterLoader, Resident,
    base::{Base, Loaded},
    kv_dtype,
    opening::{self, Opening},
};
use crate::{
    config::Config,
    device::{Arrivals, FreeBytes},
    device_bytes::DeviceBytes,
    images::Library,
    progress::Progress,
    workers::Workers,
};

/// Opens the model of `config`, and tells `progress` how far it is.
///
/// # Errors
/// If it cannot be served.
pub fn open(
    config: &Config,
    progress: &Progress,
    arrivals: Arrivals,
) -> anyhow::Result<Resident<ResidentModel, AdapterLoader>> {
    opening::open(Host, Base::open(config)?, config, progress, arrivals)
}

/// The host's own cores and memory.
struct Host;

impl Opening for Host {
    type Weights = LoadedWeights;
    type Pass = ResidentModel;

    fn load(&self, base: &Base, progress: &Progress) -> anyhow::Result<LoadedWeights> {
        let told = |at: LoadProgress| progress.done(at.done, at.total);
        Ok(LoadedWeights::load_telling(&*base.source, base.cores.len(), &told)?)
    }

    fn shape(weights: &LoadedWeights) -> (ModelConfig, LoraPrecision) {
        (weights.config().clone(), weights.adapter_precision())
    }

    fn tell(&self, base: &Loaded, weights: &LoadedWeights) {
        tracing::info!(
            model = %base.path.display(),
            architecture = weights.config().architecture,
            weight_bytes = weights.bytes(),
            threads = base.cores.len(),
            isa = ?kernels::Isa::best(),
            "weights loaded"
        );
    }

    fn pass(
        &self,
        weights: LoadedWeights,
        config: &Config,
        cores: &[usize],
    ) -> anyhow::Result<ResidentModel> {
        let options = ResidentOptions {
            cores: cores.to_vec(),
            kv_bytes: usize::try_from(DeviceBytes::of(config).on_a_cpu())
                .context("--device-bytes is more than this machine can address")?,
            kv_dtype: kv_dtype(config),
        };
        Ok(ResidentModel::new(weights, &options)?)
    }

    fn kv_blocks(pass: &ResidentModel) -> usize {
        pass.kv_blocks()
    }

    fn facts(&self) -> DeviceFacts {
        facts()
    }

    /// Opens the door for workers, if there may be any.
    fn with_workers(
        pass: ResidentModel,
        config: &Config,
        _: &[usize],
        library: Library,
    ) -> anyhow::Result<(ResidentModel, Workers)> {
        if config.max_workers == 0 {
            return Ok((pass, Workers::default()));
        }
        let rows = config.chunk_tokens + config.max_running;
        let (socket, most) = (config.worker_socket(), config.max_workers);
        let (workers, assist) = Workers::start(&socket, most, rows, pass.config(), library)?;
        Ok((pass.with_assist(assist), workers))
    }

    fn memory(self, pass: &ResidentModel) -> (Arc<dyn DeviceMemory>, FreeBytes) {
        (Arc::new(pass.adapter_memory()), FreeBytes::new(free_bytes))
    }
}

/// What the system says of its processor and memory.
pub(crate) fn facts() -> DeviceFacts {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    DeviceFacts {
        kind: DeviceKind::Cpu,
        name: name.map_or("", |(_, name)| name.trim()).to_owned(),
        memory_bytes: memory("MemTotal:"),
    }
}

/// Memory that nobody uses.
pub(crate) fn free_bytes() -> u64 {
    memory("MemAvailable:")
}

/// A line of the system's account of its memory, in bytes; 0 without one.
fn memory(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_says_what_memory_it_has_and_what_of_it_is_free() {
        let facts = facts();
        assert_eq!(facts.kind, DeviceKind::Cpu);
        assert!(facts.memory_bytes > 0 && free_bytes() > 0 && free_bytes() <= facts.memory_bytes);
        assert_eq!(memory("MemImaginary:"), 0);
    }
}
