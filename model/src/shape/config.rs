//! What a model's files say about its shape: architectures as data over one forward pass.

/// The rotary embedding. Every model is held in the "half-rotation" (NeoX, Hugging Face) layout:
/// loaders of files with interleaved pairs permute the rows of q and k once.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// How frequencies are stretched for longer contexts.
    pub scaling: RopeScaling,
}

/// Frequency scaling of the rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as trained.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Stretch.
        factor: f32,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high kept, a ramp between.
    Llama3 {
        /// Stretch of the low frequencies.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are stretched.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length of pre-training.
        original_context: f32,
    },
    /// One divisor for each of the `head_dim / 2` frequencies (GGUF's `rope_freqs.weight`).
    Factors(Vec<f32>),
}

/// Shape and constants of a decoder-only transformer with RMS norms and a gated SiLU feed-forward.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Name of the architecture as its files call it (`llama`, `mistral`, `qwen2`, `qwen3`).
    pub architecture: String,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Added to the mean square in RMS norms.
    pub norm_eps: f32,
    /// The rotary embedding.
    pub rope: Rope,
    /// q and k are normed per head before the rotary embedding (Qwen3).
    pub qk_norm: bool,
    /// The head's weights are the token embedding's.
    pub tied_head: bool,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// Attention looks back this many tokens at most (Mistral 0.1).
    pub sliding_window: Option<usize>,
}
