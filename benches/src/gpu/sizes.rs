//! Extent of the measurements: meaningful on a GPU, and just enough for a test on its stand-in.

use kernels::cuda::Cuda;

/// Device name that the CUDA emulator reports (`kernels/cuda/emulator`).
const STAND_IN: &str = "CUDA on this CPU";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Number of 32-bit values in the buffer that is copied on the device.
    pub(super) copied_words: usize,
    /// Rows and columns of the product that measures the matrix unit's rate.
    pub(super) matrix: usize,
    /// Repetitions per timing, so that the start does not count.
    pub(super) repeats: usize,
    /// Context tokens before decode, warm-up tokens and timed tokens, as in `scripts/gpu-peer.py`.
    pub(super) context: usize,
    pub(super) warm_up: usize,
    pub(super) decoded: usize,
    /// Tokens of the prompt, and of a chunk of it.
    pub(super) prompt: usize,
    pub(super) chunk: usize,
    pub(super) adapters: usize,
    pub(super) ranks: &'static [usize],
    /// Random batches that the performance models are fitted to.
    pub(super) mixes: usize,
    /// Layers of adapters in turn, so that no cache holds what the next one reads.
    pub(super) rig_layers: usize,
    pub(super) copies: &'static [usize],
    pub(super) prompts: &'static [usize],
    pub(super) cold_rank: usize,
    pub(super) arrivals: usize,
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
    copies: &[16 << 10, 64 << 10, 128 << 10, 1 << 20, 16 << 20, 128 << 20],
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
    pub(super) fn of(cuda: &Cuda) -> Self {
        if is_stand_in(cuda) { SMALL } else { REAL }
    }
}

pub(super) fn is_stand_in(cuda: &Cuda) -> bool {
    cuda.info().name == STAND_IN
}
