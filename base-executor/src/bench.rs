//! `base-executor bench`: times the engine's forward pass without engine, text or network.

use std::{path::PathBuf, sync::Arc, time::Instant};

use clap::Parser;
use kernels::{
    cuda::{Cuda, attention::KvPool},
    lora::{LayoutError, LoraPrecision, MAX_RANK},
};
use model::{
    adapter::{Adapter, LoraModule, MethodWeights},
    cuda::{CudaModel, CudaOptions, CudaWeights, Graphs},
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    shape::{
        config::ModelConfig,
        layout::{block_groups, expert_targets, group_targets, linear_shape},
        source::WeightSource,
    },
    sources::random::RandomSource,
    weights::served::ServedLayers,
};
use settings::DeviceChoice;
use types::{AdapterVersion, BlockId};

use crate::{
    config::DeviceFlags,
    device_group::{self, leader::GroupOptions},
    model_loader::{kv_dtype, precision_of},
};

/// Rounds of decode steps with and without adapters.
const ROUNDS: usize = 5;

/// Times prefill and decode of synthetic tokens and prints one JSON object.
#[derive(Debug, Clone, PartialEq, Eq, Parser)]
#[command(name = "base-executor bench", version)]
pub struct BenchConfig {
    /// Base model: a GGUF file or a directory.
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Seed of random weights instead of read ones; the model needs only a config.json.
    #[arg(long, value_name = "SEED")]
    pub random_weights: Option<u64>,
    /// Device that computes: cpu, cuda, or cuda:1 for another GPU than the first.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceChoice,
    #[command(flatten)]
    pub group: DeviceFlags,
    /// Number of threads, on the first cores.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Tokens of each prompt.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub prompt: usize,
    /// Tokens generated in each stream.
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub generate: usize,
    /// Number of sequences per step.
    #[arg(long, default_value_t = 1)]
    pub streams: usize,
    /// Number of random LoRAs of all linear layers, experts included, which the streams use in turn. Decode
    /// steps with and without the LoRAs alternate, and the output has medians.
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    pub adapters: usize,
    /// Rank of these LoRAs.
    #[arg(long, default_value_t = 16)]
    pub rank: usize,
    /// Prompt tokens per prefill step.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub chunk_tokens: usize,
    /// Arithmetic of linear layers on a CPU: int8, mixed, int15, bf16 or exact.
    #[arg(long, value_name = "PRECISION", default_value = "auto")]
    pub precision: settings::Precision,
    /// Data type of the KV cache: f32, f16, bf16 or int8.
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub kv_dtype: settings::KvDtype,
    /// Accepted for scripts; the output is JSON either way.
    #[arg(long)]
    pub json: bool,
}

/// Runs the benchmark.
///
/// # Errors
/// If the model cannot be loaded or a setting is invalid.
pub fn run(config: &BenchConfig) -> anyhow::Result<()> {
    let BenchConfig { threads, prompt, generate, streams, chunk_tokens, .. } = *config;
    anyhow::ensure!(
        threads > 0 && prompt > 0 && streams > 0 && chunk_tokens > 0,
        "numbers must be at least 1"
    );
    let of_cpu = config.device == DeviceChoice::Cpu || config.group.devices.is_none();
    anyhow::ensure!(of_cpu, "--devices work only with --device cpu");
    anyhow::ensure!((1..=MAX_RANK).contains(&config.rank), "--rank must be from 1 to {MAX_RANK}");
    let source: Box<dyn WeightSource + Send + Sync> = match config.random_weights {
        Some(seed) => Box::new(RandomSource::open(&config.model, seed)?),
        None => model::sources::open::open(&config.model)?,
    };
    let blocks = (prompt + generate).div_ceil(BLOCK_TOKENS);
    let of_cpu = config.device == DeviceChoice::Cpu || config.kv_dtype == settings::KvDtype::Auto;
    anyhow::ensure!(of_cpu, "--kv-dtype works only with --device cpu");
    match config.device {
        DeviceChoice::Cpu => {
            let (model, precision) = on_cpu(&*source, config, blocks * streams)?;
            let random = |seed| random_adapter(source.config(), config.rank, precision, seed);
            let adapters = (0..config.adapters as u64).map(random).collect::<Result<Vec<_>, _>>()?;
            time(model, &adapters, blocks, config)
        }
        DeviceChoice::Cuda { ordinal } => {
            anyhow::ensure!(config.adapters == 0, "--adapters works only with --device cpu");
            time(on_gpu(&*source, ordinal, threads, blocks * streams)?, &[], blocks, config)
        }
    }
}

/// Returns a LoRA with small random values.
fn random_adapter(
    config: &ModelConfig,
    rank: usize,
    precision: LoraPrecision,
    seed: u64,
) -> Result<Arc<PreparedAdapter>, LayoutError> {
    let mut state = seed;
    let mut random = |count: usize, bound: f32| -> Vec<f32> {
        (0..count).map(|_| bound * (next_random(&mut state) - 0.5)).collect()
    };
    let places = (0..config.layers).flat_map(|layer| {
        block_groups(config, layer).flat_map(move |group| {
            let of_expert = expert_targets(config, group).into_iter().next().unwrap_or_default();
            let targets = group_targets(config, group).into_iter().chain(of_expert);
            targets.map(move |(target, _)| (layer, target))
        })
    });
    let modules = places.map(|(layer, target)| {
        let [outputs, inputs] = linear_shape(config, target);
        let (a, b) = (random(rank * inputs, 0.125), random(outputs * rank, 0.03125));
        LoraModule { layer, target, rank, scale: 1.0, a, b }
    });
    let mut modules: Vec<_> = modules.collect();
    modules.sort_by_key(|module| (module.layer, module.target));
    let (generation, method) = (AdapterVersion([0; 32]), MethodWeights::Lora(modules));
    let adapter = Adapter { generation, method, base_model: None, stored_in_16_bits: false };
    PreparedAdapter::new(&adapter, config, precision).map(Arc::new)
}

/// Returns a number from 0 to 1 with so few bits that 16 bits hold the number exactly.
fn next_random(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 56) as f32 / 256.0
}

fn on_cpu(
    source: &(dyn WeightSource + Sync),
    config: &BenchConfig,
    blocks: usize,
) -> anyhow::Result<(ResidentModel<ServedLayers>, LoraPrecision)> {
    let rows = config.chunk_tokens.max(config.streams);
    let options = GroupOptions::of(&config.group, rows, u64::MAX, config.random_weights);
    let (weights, group) = match options {
        None => (LoadedWeights::open(source, None, config.threads, &|_| {})?, None),
        Some(options) => {
            let (weights, group) = device_group::leader::load(&config.model, source, &options, &|_| {})?;
            (weights, Some(group))
        }
    };
    let precision = precision_of(config.precision).unwrap_or_else(|| weights.suitable_precision());
    let weights = weights.with_precision(precision);
    group.map(|group| group.serve(precision)).transpose()?;
    let kv_dtype = kv_dtype(config.kv_dtype);
    let kv_bytes = weights.kv_shape(kv_dtype).block_bytes() * blocks;
    let cores = config.group.own_cores().map(|cores| cores.0.iter().map(|&core| core as usize).collect());
    let cores = cores.unwrap_or_else(|| (0..config.threads).collect());
    let options = ResidentOptions { cores, kv_bytes, kv_dtype };
    let (adapters, others) = (weights.adapter_precision(), config.group.other_cores());
    Ok((ResidentModel::new(weights, &options)?.with_borrowed_cores(&options.cores, &others)?, adapters))
}

fn on_gpu(
    source: &(dyn WeightSource + Sync),
    ordinal: u32,
    threads: usize,
    blocks: usize,
) -> anyhow::Result<CudaModel> {
    let cuda = Cuda::open(ordinal)?;
    let weights = CudaWeights::load(source, &cuda, threads, &|_| {})?;
    let kv_bytes = KvPool::block_bytes(weights.kv_shape(None)) * blocks;
    Ok(CudaModel::new(weights, &CudaOptions { kv_bytes, kv_dtype: None, graphs: Graphs::Use })?)
}

fn time<P: ForwardPass>(
    model: P,
    adapters: &[Arc<P::Adapter>],
    blocks: usize,
    config: &BenchConfig,
) -> anyhow::Result<()> {
    let BenchConfig { prompt, generate, streams, chunk_tokens, .. } = *config;
    let mut bench = ForwardBench::new(model, streams, blocks);
    // The first round touches memory for the first time and is not measured.
    bench.prefill(prompt.min(64), chunk_tokens)?;
    bench.decode(0, generate.min(4), &[])?;
    let prefill = bench.prefill(prompt, chunk_tokens)?;
    if adapters.is_empty() {
        let decode = bench.decode(prompt, generate, &[])?;
        println!("{{\"prefill_tokens_per_s\": {prefill:.1}, \"decode_tokens_per_s\": {decode:.1}}}");
        return Ok(());
    }
    bench.decode(0, generate.min(4), adapters)?;
    let (mut alone, mut adapted) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(bench.decode(prompt, generate, &[])?);
        adapted.push(bench.decode(prompt, generate, adapters)?);
    }
    let [alone, adapted] = [alone, adapted].map(median);
    println!(
        "{{\"prefill_tokens_per_s\": {prefill:.1}, \"decode_tokens_per_s\": {alone:.1}, \
         \"adapted_decode_tokens_per_s\": {adapted:.1}, \"ratio\": {:.3}}}",
        adapted / alone
    );
    Ok(())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

struct ForwardBench<P> {
    model: P,
    blocks: Vec<Vec<BlockId>>,
    /// Last token of each stream.
    last: Vec<u32>,
    logits: Vec<f32>,
}

impl<P: ForwardPass> ForwardBench<P> {
    fn new(model: P, streams: usize, blocks: usize) -> Self {
        let mut ids = (0..).map(BlockId);
        let blocks = (0..streams).map(|_| ids.by_ref().take(blocks).collect()).collect();
        Self { model, blocks, last: vec![0; streams], logits: Vec::new() }
    }

    /// Prefills all streams; returns tokens per second.
    fn prefill(&mut self, prompt: usize, chunk_tokens: usize) -> Result<f64, P::Error> {
        let vocab = u32::try_from(self.model.vocab_size()).unwrap_or(u32::MAX);
        let tokens: Vec<u32> = (0..).map(|i: u32| i.wrapping_mul(7919) % vocab).take(prompt).collect();
        let begin = Instant::now();
        for blocks in &self.blocks {
            for (index, chunk) in tokens.chunks(chunk_tokens).enumerate() {
                let start = index * chunk_tokens;
                let slice = SequenceSlice {
                    trunk: &[],
                    tokens: chunk,
                    start,
                    blocks,
                    adapter: None,
                    logits: LogitRows::Last,
                };
                self.model.forward(&[slice], &mut self.logits)?;
            }
        }
        Ok(rate(prompt * self.blocks.len(), begin))
    }

    /// Generates `count` tokens in every stream, greedily; returns tokens per second over all streams. The
    /// streams use `adapters` in turn, or the base if there are none.
    fn decode(&mut self, start: usize, count: usize, adapters: &[Arc<P::Adapter>]) -> Result<f64, P::Error> {
        let vocab = self.model.vocab_size();
        let begin = Instant::now();
        for step in 0..count {
            let slice = |(stream, (token, blocks))| SequenceSlice {
                trunk: &[],
                tokens: std::slice::from_ref(token),
                start: start + step,
                blocks,
                adapter: adapters.get(stream % adapters.len().max(1)),
                logits: LogitRows::Last,
            };
            let streams = self.last.iter().zip(self.blocks.iter().map(Vec::as_slice));
            let batch: Vec<_> = streams.enumerate().map(slice).collect();
            self.model.forward(&batch, &mut self.logits)?;
            self.last = self.logits.chunks(vocab).map(most_likely).collect();
        }
        Ok(rate(count * self.blocks.len(), begin))
    }
}

fn rate(tokens: usize, begin: Instant) -> f64 {
    tokens as f64 / begin.elapsed().as_secs_f64()
}

fn most_likely(logits: &[f32]) -> u32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let index = logits.iter().position(|&logit| logit == largest).unwrap_or(0);
    u32::try_from(index).unwrap_or(0)
}
