//! How much is measured: on a GPU enough to mean something, on its stand-in enough to show that it works.

use kernels::cuda::Cuda;

/// Device name that the CUDA emulator reports (`kernels/cuda/emulator`).
const STAND_IN: &str = "CUDA on this CPU";

/// Sizes of all benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Numbers of 32 bits in the buffer that is copied on the device.
    pub(super) copied_words: usize,
    /// Rows and columns of the product that finds the matrix unit's rate.
    pub(super) matrix: usize,
    /// What is timed together, so that starting it does not count.
    pub(super) repeats: usize,
    /// Tokens of context that decoding begins with, tokens that warm it up, and tokens that are timed: those of
    /// `scripts/gpu-peer.py`.
    pub(super) context: usize,
    /// See `context`.
    pub(super) warm_up: usize,
    /// See `context`.
    pub(super) decoded: usize,
    /// Tokens of the prompt that is computed, and of a chunk of it.
    pub(super) prompt: usize,
    /// See `prompt`.
    pub(super) chunk: usize,
    /// Adapters in the batch whose cost is measured.
    pub(super) adapters: usize,
    /// Ranks they have.
    pub(super) ranks: &'static [usize],
    /// Random batches that the performance models are fitted to.
    pub(super) mixes: usize,
    /// Layers' worth of adapters that take turns, so that no cache holds what the next one reads.
    pub(super) rig_layers: usize,
    /// Bytes of a copy from the host.
    pub(super) copies: &'static [usize],
    /// Tokens of cold prompts.
    pub(super) prompts: &'static [usize],
    /// Rank of cold adapters.
    pub(super) cold_rank: usize,
    /// Requests that arrive as they please.
    pub(super) arrivals: usize,
    /// Tokens of their longest prompt and answer.
    pub(super) longest: usize,
}

const REAL: Sizes = Sizes {
    copied_words: 1 << 29,
    matrix: 8192,
    repeats: 10,
    context: 128,
    warm_up: 4,
    decoded: 64,
    prompt: 2048,
    chunk: 512,
    adapters: 32,
    ranks: &[8, 16, 32, 64, 128],
    mixes: 40,
    rig_layers: 8,
    copies: &[64 << 10, 1 << 20, 16 << 20, 128 << 20],
    prompts: &[512, 1024, 2048],
    cold_rank: 64,
    arrivals: 24,
    longest: 256,
};

const SMALL: Sizes = Sizes {
    copied_words: 1 << 16,
    matrix: 128,
    repeats: 2,
    context: 8,
    warm_up: 1,
    decoded: 3,
    prompt: 48,
    chunk: 16,
    adapters: 4,
    ranks: &[8, 16, 32],
    mixes: 30,
    rig_layers: 1,
    copies: &[64 << 10, 1 << 20],
    prompts: &[32, 48],
    cold_rank: 8,
    arrivals: 4,
    longest: 4,
};

impl Sizes {
    /// Those that suit the device.
    pub(super) fn of(cuda: &Cuda) -> Self {
        if is_stand_in(cuda) { SMALL } else { REAL }
    }
}

/// Whether a CPU stands in for the device.
pub(super) fn is_stand_in(cuda: &Cuda) -> bool {
    cuda.info().name == STAND_IN
}
