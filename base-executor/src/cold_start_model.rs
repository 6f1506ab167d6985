//! The cost of a cold start on this machine, measured at the start and during service, and the faster mode.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kernels::{
    Isa,
    lora::{LayoutError, LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes, sum_ranks},
};
use kv_cache::copy::{BytesPerSecond, CopyStats};
use model::{
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice},
    shape::config::ModelConfig,
};
use types::BlockId;

use scheduling::perf::{
    ArrivalPolicy, ColdPrefill, Decision, HostCompute, LayerWork, PerfModel, cores_for, fit::Fit,
};

/// Rows of the slices with which a core is timed.
const SLICE_ROWS: [usize; 3] = [1, 16, 64];

/// Tokens of the passes with which the base is timed. Two points suffice for a line, since the executor
/// serves nothing meanwhile, and later passes improve it.
const PASS_TOKENS: [usize; 2] = [1, 16];

/// Rank for which the log gives the tokens per core.
const USUAL_RANK: usize = 16;

/// Prompt length for which the log gives the tokens per core.
const USUAL_PROMPT: usize = 128;

/// Longest prompt in the search for the crossover.
const LONGEST_LOOK: usize = 8192;

/// Number of timings, of which the shortest counts.
const TRIES: usize = 2;

/// Measured costs of one executor.
#[derive(Debug)]
pub struct ColdStartModel {
    perf: PerfModel,
    config: ModelConfig,
    cores: Vec<usize>,
    /// Maximum tokens of a pass on a device that plans whole passes; `None` if passes are planned by layer.
    whole_pass: Option<usize>,
    /// Copy statistics at the latest observation of the link.
    copied: CopyStats,
}

/// Decision for a cold request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ColdStartDecision {
    /// The request starts, helped by workers.
    Start {
        /// Number of workers that keep up, CaraServe's ceil(L / c); 0 without measurements.
        workers: usize,
    },
    /// Waiting for the rest of the adapter is faster.
    Wait,
}

impl ColdStartModel {
    /// Times one core at an adapter's arithmetic, and `pass` at short prompts. `whole_pass` is the maximum
    /// tokens of a pass on a device that plans whole passes.
    ///
    /// # Errors
    /// If the kernels do not support the model's shape, or the device fails.
    pub fn measure<P: ForwardPass>(
        pass: &mut P,
        config: &ModelConfig,
        cores: &[usize],
        kv_blocks: u32,
        link: Option<BytesPerSecond>,
        whole_pass: Option<usize>,
    ) -> anyhow::Result<Self> {
        let mut perf = PerfModel::new();
        time_core(&mut perf, config.hidden_size)?;
        time_base(&mut perf, pass, kv_blocks)?;
        if let Some(link) = link {
            // An emulated link is known. The first adapters measure a real one.
            for bytes in [1u64 << 16, 1 << 20, 1 << 24] {
                perf.observe_link(bytes, Duration::from_secs_f64(bytes as f64 / link.get() as f64));
            }
        }
        let (config, cores, copied) = (config.clone(), cores.to_vec(), CopyStats::default());
        let costs = Self { perf, config, cores, whole_pass, copied };
        costs.log_costs();
        costs.tell_crossover();
        Ok(costs)
    }

    /// Records a pass over `rows` rows that took `took`.
    pub(crate) fn pass(&mut self, rows: usize, took: Duration) {
        self.perf.observe_base(rows, took);
    }

    /// Records the link's copies since the previous observation.
    pub(crate) fn link(&mut self, now: CopyStats) {
        let bytes = now.copied_bytes.saturating_sub(self.copied.copied_bytes);
        let us = now.copy_us.saturating_sub(self.copied.copy_us);
        self.copied = now;
        if bytes > 0 {
            let was_unknown = self.perf.link().line().is_none();
            self.perf.observe_link(bytes, Duration::from_micros(us));
            if was_unknown {
                self.tell_crossover();
            }
        }
    }

    /// Decides whether a request of `tokens` tokens starts now with workers on `worker_cores`. The adapter
    /// lacks `missing_bytes`, queued after `queued_bytes` of other adapters.
    pub(crate) fn help(
        &self,
        adapter: &PreparedAdapter,
        tokens: usize,
        [missing_bytes, queued_bytes]: [u64; 2],
        worker_cores: &[u32],
    ) -> ColdStartDecision {
        let work = layer_work(adapter, self.config.layers);
        let hands = HostCompute::of(worker_cores.len(), self.cores.len());
        let is_shared = |core: &&u32| self.cores.iter().any(|own| usize::try_from(**core) == Ok(*own));
        let shared = worker_cores.iter().filter(is_shared).count();
        let interference = 1.0 + shared as f64 / self.cores.len().max(1) as f64;
        let layers = self.config.layers;
        // After its first pass a prompt continues like any other.
        let (first, uptake) = self.first_pass(tokens);
        let cold = ColdPrefill {
            tokens: first,
            work,
            layers,
            missing_bytes,
            queued_bytes,
            uptake,
            hands,
            interference,
        };
        match self.perf.decide(&cold) {
            Decision::Wait => ColdStartDecision::Wait,
            Decision::Assist => {
                let workers =
                    self.perf.tokens_per_core(work, layers, tokens).map_or(0, |c| cores_for(tokens, c));
                ColdStartDecision::Start { workers }
            }
        }
    }

    /// Returns the tokens of the first pass, and when arrived ranks take effect.
    fn first_pass(&self, tokens: usize) -> (usize, ArrivalPolicy) {
        self.whole_pass
            .map_or((tokens, ArrivalPolicy::ByLayer), |most| (tokens.min(most), ArrivalPolicy::ByPass))
    }

    /// Logs the measurements, with CaraServe's c for an attention adapter of usual rank and prompt.
    fn log_costs(&self) {
        let ModelConfig { hidden_size, layers, .. } = self.config;
        let work = LayerWork { multiply_adds: 8 * (USUAL_RANK * hidden_size) as u64, slices: 4 };
        let slope = |fit: &Fit| fit.line().map_or(0.0, |line| line.alpha);
        let start = |fit: &Fit| fit.line().map_or(0.0, |line| line.beta);
        tracing::info!(
            core_multiply_adds_per_us = (1e-6 / slope(self.perf.core())).round(),
            core_ns_per_slice = (1e9 * start(self.perf.core())).round(),
            base_us_per_token = (1e6 * slope(self.perf.base())).round(),
            base_us_per_pass = (1e6 * start(self.perf.base())).round(),
            tokens_per_core = self.perf.tokens_per_core(work, layers, USUAL_PROMPT),
            at_rank = USUAL_RANK,
            at_prompt = USUAL_PROMPT,
            "measured the costs of cold starts"
        );
    }

    /// Logs, once the link is known, the prompt length per rank from which waiting is faster than one
    /// worker's help (C-28).
    fn tell_crossover(&self) {
        if self.perf.link().line().is_none() {
            return;
        }
        let crossover = |rank| self.crossover(rank);
        let [rank_16, rank_64, rank_128] = [16, 64, 128].map(crossover);
        tracing::info!(
            rank_16,
            rank_64,
            rank_128,
            "least prompt tokens from which a cold prompt waits for an attention adapter, by rank; \
             without a figure, none waits"
        );
    }

    /// Returns the shortest prompt that waits for an attention adapter of this rank, despite one worker.
    fn crossover(&self, rank: usize) -> Option<usize> {
        let ModelConfig { hidden_size, layers, context_length, .. } = self.config;
        let work = LayerWork { multiply_adds: 8 * (rank * hidden_size) as u64, slices: 4 };
        // Two bytes per value of A and B.
        let missing_bytes = work.multiply_adds.saturating_mul(2 * layers as u64);
        let (queued_bytes, interference) = (0, 1.0);
        let hands = HostCompute::of(1, self.cores.len());
        let (longest, uptake) = self.first_pass(context_length.min(LONGEST_LOOK));
        let cold =
            ColdPrefill { tokens: 1, work, layers, missing_bytes, queued_bytes, uptake, hands, interference };
        self.perf.crossover_tokens(&cold, longest)
    }
}

/// Returns the mean work of a core per layer of the adapter.
fn layer_work(adapter: &PreparedAdapter, layers: usize) -> LayerWork {
    let (mut multiply_adds, mut matrices) = (0u64, 0usize);
    for (_, _, matrix) in adapter.matrices() {
        multiply_adds += (matrix.rank() * (matrix.columns() + matrix.rows())) as u64;
        matrices += 1;
    }
    let layers = layers.max(1);
    LayerWork { multiply_adds: multiply_adds.div_ceil(layers as u64), slices: matrices.div_ceil(layers) }
}

/// Times one core with slices of a square layer of rank 16.
fn time_core(perf: &mut PerfModel, width: usize) -> Result<(), LayoutError> {
    let values = vec![0.5f32; USUAL_RANK * width];
    let mut bytes = Vec::new();
    let precision = LoraPrecision::Compact;
    let layout = MatrixLayout::append(&mut bytes, USUAL_RANK, width, width, 1.0, &values, &values, precision);
    let bytes: SharedBytes = Arc::new(bytes);
    let matrix = LoraMatrix::over(&bytes, layout)?;
    for rows in SLICE_ROWS {
        let x = vec![0.25f32; rows * width];
        let mut out = vec![0.0f32; rows * width];
        let took = least(|| sum_ranks(Isa::best(), &x, &matrix, 0..USUAL_RANK, &mut out));
        perf.observe_core((rows * USUAL_RANK * 2 * width) as u64, took);
    }
    Ok(())
}

/// Times prompt passes through the base.
fn time_base<P: ForwardPass>(perf: &mut PerfModel, pass: &mut P, kv_blocks: u32) -> Result<(), P::Error> {
    let vocabulary = u32::try_from(pass.vocab_size()).unwrap_or(u32::MAX);
    let mut logits = Vec::new();
    for tokens in PASS_TOKENS {
        let blocks: Vec<BlockId> = (0..kv_blocks).map(BlockId).take(tokens.div_ceil(BLOCK_TOKENS)).collect();
        let tokens: Vec<u32> =
            (0..vocabulary).cycle().take(tokens.min(blocks.len() * BLOCK_TOKENS)).collect();
        let slice = || SequenceSlice {
            trunk: &[],
            tokens: &tokens,
            start: 0,
            blocks: &blocks,
            adapter: None,
            logits: LogitRows::Last,
        };
        let mut computed = Ok(());
        let took = least(|| computed = pass.forward(&[slice()], &mut logits));
        computed?;
        perf.observe_base(tokens.len(), took);
    }
    Ok(())
}

/// Returns the shortest of [`TRIES`] runs.
fn least(mut run: impl FnMut()) -> Duration {
    let time = |_| {
        let begin = Instant::now();
        run();
        begin.elapsed()
    };
    (0..TRIES).map(time).min().unwrap_or_default()
}

#[cfg(test)]
mod tests;
