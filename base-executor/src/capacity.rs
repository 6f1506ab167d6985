//! `base-executor capacity`: computes how many tokens and adapters fit into memory, without loading a model.
//!
//! The figures come from the functions that size the memory of a running executor. The only input is the
//! header of the model's files, so a model of any size takes a moment.

use clap::Parser;
use kernels::{
    attention::KvPrecision,
    cuda::{Cuda, CudaError},
    lora::LoraPrecision,
};
use model::forward::BLOCK_TOKENS;
use serde_json::{Value, json};
use settings::{ByteCount, DeviceChoice};

use crate::{
    budget::{MemoryBudget, free_bytes},
    config::{ExecutorConfig, LayerSocket},
    model_loader::footprint::{BaseFootprint, TargetSet},
};

/// Ranks of the adapters whose sizes are reported.
const RANKS: [usize; 3] = [8, 16, 64];

/// Prints as one JSON object how many tokens and adapters fit, from the settings and the model's header.
#[derive(Debug, Clone, PartialEq, Parser)]
#[command(name = "base-executor capacity", version)]
pub struct CapacityConfig {
    #[command(flatten)]
    pub executor: ExecutorConfig,
    /// Memory of a GPU that need not be in this machine; all of it counts as free.
    #[arg(long, value_name = "BYTES")]
    pub device_memory: Option<ByteCount>,
}

#[derive(Debug, thiserror::Error)]
enum CapacityError {
    #[error(
        "the memory of a GPU was given, but the device is the CPU; set --device cuda, or omit that memory"
    )]
    NotAGpu,
    #[error(transparent)]
    Gpu(#[from] CudaError),
}

/// Computes and prints the figures.
///
/// # Errors
/// If the settings or the model cannot be used, or a GPU's memory is unknown or too small.
pub fn run(config: CapacityConfig) -> anyhow::Result<()> {
    let mut executor = config.executor.validated()?;
    // Split clients need no memory of the base, and their files would be looked for.
    executor.layers.place = Some(LayerSocket::Off);
    let gpu = gpu_memory(executor.device, config.device_memory)?;
    let base = BaseFootprint::open(&executor, gpu)?;
    println!("{}", report(&executor, &base, gpu)?);
    Ok(())
}

/// Returns free and total bytes of the GPU; `None` on a CPU.
fn gpu_memory(device: DeviceChoice, given: Option<ByteCount>) -> Result<Option<(u64, u64)>, CapacityError> {
    match (device, given) {
        (DeviceChoice::Cpu, None) => Ok(None),
        (DeviceChoice::Cpu, Some(_)) => Err(CapacityError::NotAGpu),
        (DeviceChoice::Cuda { .. }, Some(bytes)) => Ok(Some((bytes.0, bytes.0))),
        (DeviceChoice::Cuda { ordinal }, None) => {
            let cuda = Cuda::open(ordinal)?;
            Ok(Some((cuda.free_bytes()? as u64, cuda.info().memory_bytes as u64)))
        }
    }
}

fn report(
    executor: &ExecutorConfig,
    base: &BaseFootprint<'_>,
    gpu: Option<(u64, u64)>,
) -> anyhow::Result<Value> {
    let [pool_blocks, kv_blocks, adapter_blocks] = base.blocks();
    let blocks_bytes = |blocks: u32| u64::from(blocks) * base.block_bytes as u64;
    let mut sizes = Vec::new();
    for (targets, rank) in TargetSet::ALL.into_iter().flat_map(|targets| RANKS.map(|rank| (targets, rank))) {
        let adapter = base.adapter(targets, rank)?;
        sizes.push(json!({
            "targets": targets.as_str(),
            "rank": rank,
            "bytes": adapter.bytes,
            "device_bytes": adapter.blocks.map(blocks_bytes),
            "host_adapters": executor.adapter_bytes.0 / adapter.bytes.max(1),
            "device_adapters": adapter.blocks.map_or(0, |blocks| adapter_blocks / blocks.max(1)),
        }));
    }
    Ok(json!({
        "architecture": base.shape.architecture,
        "device": executor.device.to_string(),
        "context_length": base.context_length(),
        "weights": { "bytes": base.weights, "streamed": executor.weights.bytes.is_some() },
        "kv": {
            "bits": kv_bits(base.kv),
            "block_bytes": base.block_bytes,
            "bytes_per_token": base.block_bytes / BLOCK_TOKENS,
            "pool_blocks": pool_blocks,
            "blocks": kv_blocks,
            "tokens": u64::from(kv_blocks) * BLOCK_TOKENS as u64,
        },
        "adapters": {
            "bits": adapter_bits(base.adapters),
            "host_bytes": executor.adapter_bytes.0,
            "device_bytes": blocks_bytes(adapter_blocks),
            "sizes": sizes,
        },
        "host": host_memory(executor, base),
        "gpu": gpu.map(|(free, total)| json!({
            "free_bytes": free,
            "total_bytes": total,
            "scratch_bytes": base.scratch,
            "pool_bytes": base.pool,
        })),
    }))
}

/// Reports the host memory that the executor takes, by purpose, and its limits.
fn host_memory(executor: &ExecutorConfig, base: &BaseFootprint<'_>) -> Value {
    let limit = MemoryBudget::of_this_machine(executor.process_memory, executor.adapter_bytes.0);
    let on_cpu = |bytes| if executor.device == DeviceChoice::Cpu { bytes } else { 0 };
    json!({
        "weights_bytes": on_cpu(base.weights),
        "pool_bytes": on_cpu(base.pool),
        "adapter_bytes": executor.adapter_bytes.0,
        "kv_offload_bytes": executor.host_bytes.0,
        "limit_bytes": limit.stats().limit_bytes,
        "free_bytes": free_bytes(),
    })
}

fn kv_bits(precision: KvPrecision) -> u32 {
    match precision {
        KvPrecision::F32 => 32,
        KvPrecision::F16 | KvPrecision::Bf16 => 16,
        KvPrecision::Int8 => 8,
    }
}

fn adapter_bits(precision: LoraPrecision) -> u32 {
    match precision {
        LoraPrecision::Exact => 32,
        LoraPrecision::Compact | LoraPrecision::Bf16 => 16,
    }
}
