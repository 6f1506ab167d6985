//! The base on the host's own cores.

use std::fs;

use anyhow::Context as _;
use model::{
    device_copy::DeviceMemory,
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
};
use shmproto::message::{DeviceFacts, DeviceKind};

use super::{AdapterLoader, Platform, Resident, base::Base, costs, device_settings, kv_dtype, some_blocks};
use crate::{
    config::Config,
    device::{Arrivals, FreeBytes},
    images::Library,
    progress::Progress,
    workers::Workers,
};

/// Memory for keys and values unless told otherwise.
const DEFAULT_KV_BYTES: u64 = 512 << 20;

/// Opens the model of `config`, and tells `progress` how far it is.
///
/// # Errors
/// If it cannot be served.
pub fn open(
    config: &Config,
    progress: &Progress,
    arrivals: Arrivals,
) -> anyhow::Result<Resident<ResidentModel, AdapterLoader>> {
    let base = Base::open(config)?;
    progress.stage(base.stage());
    failpoint::pass("executor.before_weights");
    let told = |at: model::weights::LoadProgress| progress.done(at.done, at.total);
    let weights = LoadedWeights::load_telling(&*base.source, base.cores.len(), &told)?;
    failpoint::pass("executor.after_weights");
    let mut base = base.close()?;
    let (shape, suits) = (weights.config().clone(), weights.adapter_precision());
    let loan = base.lend(config, &shape, suits);
    tracing::info!(
        model = %base.path.display(),
        architecture = shape.architecture,
        weight_bytes = weights.bytes(),
        threads = base.cores.len(),
        isa = ?kernels::Isa::best(),
        "weights loaded"
    );
    let options = options(config, base.cores.clone())?;
    let library = Library::new().context("no descriptor is left for the images of adapters")?;
    let loader = AdapterLoader::new(config, &shape, suits, &library);
    progress.stage("taking memory for keys and values");
    let mut pass = ResidentModel::new(weights, &options)?;
    let kv_blocks = some_blocks(pass.kv_blocks())?;
    let facts = base.facts(facts(), &shape, kv_blocks);
    let settings = device_settings(config);
    let costs = costs(&settings, &mut pass, &shape, &base.cores, kv_blocks, progress)?;
    let (pass, workers) = with_workers(pass, config, library)?;
    let (memory, free) = (DeviceMemory::Cpu, FreeBytes::new(free_bytes));
    let placement = Platform { settings, memory, free, arrivals, workers, costs }.placement()?;
    let tenancy = loan.map(|loan| loan.begin(&pass)).transpose()?;
    Ok(Resident { pass, loader, placement, tenancy, facts })
}

fn options(config: &Config, cores: Vec<usize>) -> anyhow::Result<ResidentOptions> {
    let kv_bytes = config.kv_bytes.map_or(DEFAULT_KV_BYTES, |bytes| bytes.0);
    Ok(ResidentOptions {
        cores,
        kv_bytes: usize::try_from(kv_bytes).context("--kv-bytes is more than this machine can address")?,
        kv_dtype: kv_dtype(config),
    })
}

/// Opens the door for workers, if there may be any.
fn with_workers(
    pass: ResidentModel,
    config: &Config,
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
