//! The real executor on the GPU with real workers, and adapters for it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kernels::{attention::KvPrecision, cuda::attention::KvPool};
use model::{forward::BLOCK_TOKENS, resident::kv_shape};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use super::lab::{GpuBenchContext, SEED};
use crate::{
    cold::{ColdCompute, ColdExecutor, ExecutorPlacement, RequestArrival, adapters},
    lora::AdapterShape,
};

/// Capacity of an executor's KV cache in tokens.
const KV_TOKENS: usize = 4096;
/// Maximum number of workers, if there are enough cores.
const MAX_WORKERS: usize = 8;

pub(super) struct GpuTestbed<'a> {
    lab: &'a GpuBenchContext,
    base_cores: Vec<usize>,
    worker_cores: Vec<usize>,
    pub(super) adapters: Vec<PathBuf>,
    _folder: TempDir,
}

impl<'a> GpuTestbed<'a> {
    /// Assigns a quarter of the cores to the base, most others to workers, and writes `count` adapters of
    /// `rank` on q, k and v.
    ///
    /// # Errors
    /// If adapters cannot be written.
    pub(super) fn new(lab: &'a GpuBenchContext, rank: usize, count: usize) -> Result<Self> {
        let cores = lab.cores.numbers();
        let base = (cores.len() / 4).max(1);
        let others = if cores.len() > base { &cores[base..] } else { cores };
        let worker_cores = others[..others.len().min(MAX_WORKERS)].to_vec();
        let folder = tempfile::tempdir().context("no folder for adapters")?;
        let adapters = adapters::write_for(
            &AdapterShape::of_config(lab.config()),
            rank,
            count,
            &folder.path().join("adapters"),
        )?;
        Ok(Self { lab, base_cores: cores[..base].to_vec(), worker_cores, adapters, _folder: folder })
    }

    pub(super) fn workers(&self) -> usize {
        self.worker_cores.len()
    }

    pub(super) fn options(&self, further: &[&str]) -> Vec<String> {
        let device = self.lab.device();
        let seed = SEED.to_string();
        let common = ["--device", device.as_str(), "--random-weights", seed.as_str()];
        common.iter().chain(further).map(|&word| word.to_owned()).collect()
    }

    /// Executor over the real link with all workers and memory for every adapter. `options` come from
    /// [`Self::options`].
    pub(super) fn place<'b>(&'b self, options: &'b [String]) -> ExecutorPlacement<'b> {
        let shape = kv_shape(self.lab.config(), KvPrecision::F16);
        ExecutorPlacement {
            programs: &self.lab.programs,
            model: self.lab.shape_folder(),
            base_cores: &self.base_cores,
            worker_core: self.worker_cores[0],
            further_workers: &self.worker_cores[1..],
            device_bytes: 1 << 30,
            host_bytes: 1 << 30,
            link_gbps: f64::INFINITY,
            kv_bytes: (KvPool::block_bytes(shape) * KV_TOKENS.div_ceil(BLOCK_TOKENS)) as u64,
            options,
            helper: ColdCompute::Worker,
        }
    }
}

/// Async runtime that drives the executors.
///
/// # Errors
/// If there is none.
pub(super) fn runtime() -> Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("no runtime")
}

/// Milliseconds to the first token of a lone request.
///
/// # Errors
/// Fails if the request is not answered.
pub(super) async fn first_token_ms(
    executor: &mut ColdExecutor,
    adapter: Option<usize>,
    prompt: usize,
    seed: usize,
) -> Result<f64> {
    let seed = (seed * 8192 + prompt) as u64;
    let arrival = RequestArrival { at: std::time::Duration::ZERO, adapter, prompt, answer: 2, seed };
    let served = executor.serve(&[arrival]).await?;
    let first = served.first().context("one request has one answer")?.first;
    Ok(first.as_secs_f64() * 1000.0)
}

/// Bytes of an adapter's file, about its size in the host tier.
///
/// # Errors
/// Fails if the file is missing.
pub(super) fn file_bytes(folder: &Path) -> Result<u64> {
    let file = folder.join("adapter_model.safetensors");
    Ok(std::fs::metadata(&file).with_context(|| format!("no {}", file.display()))?.len())
}
