//! The GPU memory that a base needs, summed up before any allocation.

use std::fmt;

use model::shape::{
    config::ModelConfig,
    layout::{required_tensors, tensor_shape},
    source::{TensorId, WeightSource},
};
use settings::DeviceChoice;

use crate::{config::ExecutorConfig, device_memory_split::DeviceBytes};

/// Dequantized weight tiles, cuBLASLt's workspace, tables, and the driver's rounding.
const FIXED_SCRATCH_BYTES: u64 = 192 << 20;

/// Maximum bytes per value of a pass's scratch memory.
const NUMBER_BYTES: u64 = 4;

/// Tenths of the remaining memory that the pool gets by default.
const POOL_TENTHS: u64 = 9;

/// GPU memory of a base, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryPlan {
    pub(crate) weights: u64,
    pub(crate) scratch: u64,
    /// Block pool for KV cache and adapters; `None` for the remaining memory.
    pool: Option<u64>,
    /// Minimum pool: one block.
    least_pool: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) struct InsufficientGpuMemory {
    device: DeviceChoice,
    free: u64,
    total: u64,
    plan: MemoryPlan,
}

impl MemoryPlan {
    /// Plans the memory of `source`; `block_bytes` is the size of a KV block.
    pub(super) fn of(config: &ExecutorConfig, source: &dyn WeightSource, block_bytes: u64) -> Self {
        let (shape, device) = (source.config(), DeviceBytes::of(config));
        Self {
            weights: weight_bytes(source, shape),
            scratch: scratch_bytes(config, shape),
            pool: device.said(),
            least_pool: block_bytes,
        }
    }

    /// Compares the plan with the GPU's free memory.
    ///
    /// # Errors
    /// Fails if the plan exceeds the free memory.
    pub(crate) fn check(
        self,
        device: DeviceChoice,
        free: u64,
        total: u64,
    ) -> Result<(), InsufficientGpuMemory> {
        match self.all() <= free {
            true => Ok(()),
            false => Err(InsufficientGpuMemory { device, free, total, plan: self }),
        }
    }

    /// Returns the pool size after the weights are loaded and `free` bytes remain.
    pub(crate) fn pool_bytes(&self, free: u64) -> u64 {
        let left = free.saturating_sub(self.scratch);
        self.pool.unwrap_or_else(|| (left / 10 * POOL_TENTHS).max(self.least_pool))
    }

    fn all(&self) -> u64 {
        let pool = self.pool.unwrap_or(self.least_pool);
        [self.weights, self.scratch, pool].into_iter().fold(0, u64::saturating_add)
    }
}

impl fmt::Display for InsufficientGpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, free, total, plan } = self;
        let MemoryPlan { weights, scratch, pool, least_pool } = plan;
        let (pool, least) = (pool.unwrap_or(*least_pool), if pool.is_none() { "at least " } else { "" });
        write!(
            f,
            "{device} has {} of {} free, but {} are needed: {} for weights, {} for passes \
             (--chunk-tokens, --max-running), {least}{} for KV cache and adapters (--device-bytes); \
             lower one of these options, use a smaller model, stop other programs on the GPU, or use \
             --device cpu",
            HumanBytes(*free),
            HumanBytes(*total),
            HumanBytes(plan.all()),
            HumanBytes(*weights),
            HumanBytes(*scratch),
            HumanBytes(pool),
        )
    }
}

/// Formats a byte count for messages.
struct HumanBytes(u64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 30 => write!(f, "{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
            bytes => write!(f, "{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
        }
    }
}

/// Returns the bytes of all weights as stored; norms are kept in 32 bits.
fn weight_bytes(source: &dyn WeightSource, shape: &ModelConfig) -> u64 {
    let bytes = |id: TensorId| {
        let [rows, cols] = tensor_shape(shape, id);
        let row = source.kind(id).and_then(|kind| kind.row_bytes(cols));
        let row = row.map_or(NUMBER_BYTES * cols as u64, |bytes| bytes as u64);
        (rows as u64).saturating_mul(row)
    };
    required_tensors(shape, &[]).map(bytes).fold(0, u64::saturating_add)
}

/// Returns the bytes of a pass's scratch memory: rows between linear layers, and logits.
fn scratch_bytes(config: &ExecutorConfig, shape: &ModelConfig) -> u64 {
    let queries = shape.heads * shape.head_dim;
    let qkv = queries + 2 * shape.kv_heads * shape.head_dim;
    let widths = 3 * shape.hidden_size + queries + qkv + 3 * shape.intermediate_size + shape.vocab_size;
    let rows = config.chunk_tokens.saturating_add(config.max_running) as u64;
    // Buffers kept for reuse grow by doubling.
    let kept = rows.saturating_mul(widths as u64).saturating_mul(2 * NUMBER_BYTES);
    kept.saturating_add(FIXED_SCRATCH_BYTES)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use model::sources::random::RandomSource;

    use super::*;

    const DEVICE: DeviceChoice = DeviceChoice::Cuda { ordinal: 0 };

    fn plan(arguments: &[&str]) -> MemoryPlan {
        let shape = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/shapes/llama-2-7b");
        let required = ["base-executor", "--model", "m", "--socket", "s"];
        let config = ExecutorConfig::parse_from(required.iter().chain(arguments));
        MemoryPlan::of(&config, &RandomSource::open(shape.as_ref(), 1).unwrap(), 8 << 20)
    }

    #[test]
    fn a_7b_model_takes_what_its_numbers_take() {
        let plan = plan(&[]);
        // 6,738,149,376 values of two bytes; norms have two bytes more than stored.
        assert_eq!(plan.weights, 13_476_831_232);
        assert!((300 << 20..1 << 30).contains(&plan.scratch), "{plan:?}");
        assert_eq!(plan.check(DEVICE, 80 << 30, 80 << 30), Ok(()));
    }

    #[test]
    fn the_pool_gets_nine_tenths_of_what_is_left_or_what_it_was_promised() {
        let free = |plan: &MemoryPlan| plan.scratch + 1_000_000_000;
        let default = plan(&[]);
        assert_eq!(default.pool_bytes(free(&default)), 900_000_000);
        assert_eq!(default.pool_bytes(0), 8 << 20);
        let bounded = plan(&["--device-bytes", "1GiB"]);
        assert_eq!(bounded.pool_bytes(free(&bounded)), 1 << 30);
        let split = plan(&["--kv-bytes", "1GiB", "--device-adapter-bytes", "256MiB"]);
        assert_eq!(split.pool_bytes(free(&split)), (1 << 30) + (256 << 20));
    }

    #[test]
    fn what_does_not_fit_is_told_with_all_figures_and_what_to_lower() {
        let error =
            plan(&["--device-bytes", "16GiB"]).check(DEVICE, 10 << 30, 24 << 30).unwrap_err().to_string();
        for part in [
            "cuda:0 has 10.00 GiB of 24.00 GiB free",
            "12.55 GiB for weights",
            "16.00 GiB for KV cache and adapters",
            "--device cpu",
        ] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
        assert!(!error.contains('\n'));
        let least = plan(&[]).check(DEVICE, 1 << 30, 24 << 30).unwrap_err().to_string();
        assert!(least.contains("at least 8.0 MiB for KV cache and adapters"), "{least}");
    }
}
