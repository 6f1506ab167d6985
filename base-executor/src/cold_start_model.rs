//! What a cold start costs on this machine, and which way is the shorter: measured at start, then on the way.

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

/// Rows of a slice that one core is timed with.
const SLICE_ROWS: [usize; 3] = [1, 16, 64];

/// Tokens of the passes that the base is timed with: as few as give a line, since nothing is served meanwhile. Whatever is
/// computed later makes it better.
const PASS_TOKENS: [usize; 2] = [1, 16];

/// The rank for which the log tells how many tokens a core keeps up with.
const USUAL_RANK: usize = 16;

/// The prompt it is told for, in tokens.
const USUAL_PROMPT: usize = 128;

/// Longest prompt for which the crossover is looked for.
const LONGEST_LOOK: usize = 8192;

/// Timings of one thing; the least disturbed counts.
const TRIES: usize = 2;

/// Measured costs of one executor.
#[derive(Debug)]
pub struct ColdStartModel {
    perf: PerfModel,
    config: ModelConfig,
    cores: Vec<usize>,
    /// Most tokens of a pass that a device takes whole; `None`: it is given layer by layer.
    whole_pass: Option<usize>,
    /// What had been copied when the link was last looked at.
    copied: CopyStats,
}

/// How a cold request is to be helped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColdStartDecision {
    /// It starts; so many workers keep up with it.
    Start {
        /// CaraServe's ceil(L / c); 0 if nothing is known yet.
        workers: usize,
    },
    /// Waiting for the rest of the adapter is faster.
    Wait,
}

impl ColdStartModel {
    /// Times one core of this machine at an adapter's arithmetic, and `pass` at short prompts. `whole_pass` is for a device
    /// that takes passes of at most so many tokens as a whole, and uses what arrives meanwhile in the next one.
    ///
    /// # Errors
    /// If the model's shape is not one the kernels take, or the device fails.
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
            // An emulated link is known; a real one shows itself with the first adapters.
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

    /// The lines fitted so far.
    #[must_use]
    pub fn perf(&self) -> &PerfModel {
        &self.perf
    }

    /// A pass over so many rows took so long.
    pub(crate) fn pass(&mut self, rows: usize, took: Duration) {
        self.perf.observe_base(rows, took);
    }

    /// The link has moved what `now` says.
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

    /// Whether a request of `tokens` tokens, of whose adapter `missing_bytes` are missing behind `queued_bytes` of others,
    /// starts now with the help of workers on `worker_cores`.
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
        // Behind its first pass a prompt goes on like any other.
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

    /// What of a prompt is decided on, and when what has arrived of its adapter is used.
    fn first_pass(&self, tokens: usize) -> (usize, ArrivalPolicy) {
        self.whole_pass
            .map_or((tokens, ArrivalPolicy::ByLayer), |most| (tokens.min(most), ArrivalPolicy::ByPass))
    }

    /// Publishes what was measured, with CaraServe's c for an attention adapter of a usual rank and prompt.
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
            "measured what cold starts cost"
        );
    }

    /// Publishes from which prompt on waiting for an adapter of every rank is faster than the help of one worker (C-28),
    /// once the link is known. `None`: no prompt that was looked at.
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
            "cold prompts from so many tokens on wait for attention adapters of a rank; of a rank not named, none"
        );
    }

    /// The shortest prompt that waits for an attention adapter of this rank rather than be helped by one worker.
    fn crossover(&self, rank: usize) -> Option<usize> {
        let ModelConfig { hidden_size, layers, context_length, .. } = self.config;
        let work = LayerWork { multiply_adds: 8 * (rank * hidden_size) as u64, slices: 4 };
        // Two bytes for each number of A and B.
        let missing_bytes = work.multiply_adds.saturating_mul(2 * layers as u64);
        let (queued_bytes, interference) = (0, 1.0);
        let hands = HostCompute::of(1, self.cores.len());
        let (longest, uptake) = self.first_pass(context_length.min(LONGEST_LOOK));
        let cold =
            ColdPrefill { tokens: 1, work, layers, missing_bytes, queued_bytes, uptake, hands, interference };
        self.perf.crossover_tokens(&cold, longest)
    }
}

/// What a layer of the adapter costs a core, on average.
fn layer_work(adapter: &PreparedAdapter, layers: usize) -> LayerWork {
    let (mut multiply_adds, mut matrices) = (0u64, 0usize);
    for (_, _, matrix) in adapter.matrices() {
        multiply_adds += (matrix.rank() * (matrix.columns() + matrix.rows())) as u64;
        matrices += 1;
    }
    let layers = layers.max(1);
    LayerWork { multiply_adds: multiply_adds.div_ceil(layers as u64), slices: matrices.div_ceil(layers) }
}

/// Times one core computing slices of a square layer of rank 16.
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

/// Times passes of a prompt through the base.
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

/// The shortest of some runs.
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
