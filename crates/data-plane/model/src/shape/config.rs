//! Configuration of a model: architectures as data for one forward pass.

use std::fmt;

use kernels::{attention::AttentionLimits, elementwise::Gate};

use super::experts::Experts;

/// Rotary embedding. Every model is held in the "half-rotation" (NeoX, Hugging Face) layout. Readers of files
/// with interleaved pairs permute the rows of q and k once.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f32,
    /// Scaling of the frequencies for longer contexts.
    pub scaling: RopeScaling,
}

/// Frequency scaling of the rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as in training.
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        /// Divisor of all frequencies.
        factor: f32,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are stretched.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// Context length of pre-training.
        original_context: f32,
    },
    /// YaRN: frequencies of features that turn less than `beta_slow` times within the original context are
    /// divided by `factor`. Frequencies of features that turn more than `beta_fast` times are kept, with a
    /// ramp between.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f32,
        /// Turns above which frequencies are kept.
        beta_fast: f32,
        /// Turns below which frequencies are divided.
        beta_slow: f32,
        /// Context length of pre-training.
        original_context: f32,
        /// Whether the ramp begins and ends at whole features.
        truncate: bool,
    },
    /// Divisor of each of the `rotary_dim / 2` frequencies (GGUF's `rope_freqs.weight`).
    Factors(Vec<f32>),
}

/// Positions that a layer's attention reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionReach {
    /// All earlier positions of the sequence.
    Global,
    /// Positions within the sliding window, or all without a window.
    Local,
}

/// Places of the norms in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BlockNorms {
    /// On the inputs of attention and feed-forward.
    #[default]
    Before,
    /// On inputs, and on outputs before the residual addition (Gemma).
    Around,
    /// On the outputs only (OLMo 2).
    Behind,
}

/// Deviations of a model family from Llama, which is the default.
#[derive(Clone, PartialEq, Default)]
pub struct ArchFlags {
    /// Activation function of the feed-forward's gate.
    pub gate: Gate,
    /// Places of the norms in a block.
    pub norms: BlockNorms,
    /// Whether query and key norms, if any, cover all heads at once (OLMo 2).
    pub wide_query_norms: bool,
    /// Factor of attention and feed-forward outputs before the residual addition (Granite).
    pub update_scale: Option<f32>,
    /// Factor of token embeddings (Gemma, Granite).
    pub embedding_scale: Option<f32>,
    /// Factor of attention scores, if not `1 / sqrt(head_dim)` (Gemma, Granite).
    pub score_scale: Option<f32>,
    /// Soft limit of the magnitude of scores (Gemma 2).
    pub score_cap: Option<f32>,
    /// Soft limit of the magnitude of logits (Gemma 2).
    pub logit_cap: Option<f32>,
    /// Divisor of the logits (Granite). The reader divides the weights of the output norm instead. The head
    /// is linear, so logits are divided with any adapter.
    pub logit_divisor: Option<f32>,
    /// Layers without the sliding window of the others (Gemma), ascending.
    pub global_layers: Vec<usize>,
    /// Rotary embedding of the layers with a window, if they have their own (Gemma 3).
    pub local_rope: Option<Rope>,
    /// Number of leading features of a head that are rotated, if not all (Phi).
    pub rotary_dim: Option<usize>,
    /// Factor of the rotated features (longrope, YaRN).
    pub rotary_magnitude: Option<f32>,
    /// Whether each query head has a sink: a score of the softmax without a value (gpt-oss).
    pub sinks: bool,
    /// Whether routers and experts have biases (gpt-oss).
    pub expert_biases: bool,
}

/// Base [identities](super::identity) hash this text. Flags that were added later are omitted unless set, so
/// that the identities of older models stay the same.
impl fmt::Debug for ArchFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("ArchFlags");
        text.field("gate", &self.gate)
            .field("norms", &self.norms)
            .field("wide_query_norms", &self.wide_query_norms)
            .field("update_scale", &self.update_scale)
            .field("embedding_scale", &self.embedding_scale)
            .field("score_scale", &self.score_scale)
            .field("score_cap", &self.score_cap)
            .field("logit_cap", &self.logit_cap)
            .field("logit_divisor", &self.logit_divisor)
            .field("global_layers", &self.global_layers)
            .field("local_rope", &self.local_rope)
            .field("rotary_dim", &self.rotary_dim)
            .field("rotary_magnitude", &self.rotary_magnitude);
        if self.sinks {
            text.field("sinks", &true);
        }
        if self.expert_biases {
            text.field("expert_biases", &true);
        }
        text.finish()
    }
}

/// Shape and constants of a decoder-only transformer with RMS norms and a gated feed-forward.
#[derive(Clone, PartialEq)]
pub struct ModelConfig {
    /// Architecture name in the model's files (`llama`, `mistral`, `granite`, `gemma3` and so on).
    pub architecture: String,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward.
    pub intermediate_size: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Features of one head.
    pub head_dim: usize,
    /// Addend to the mean square in RMS norms.
    pub norm_eps: f32,
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
    /// Whether q and k are normed before the rotary embedding (Qwen3, Gemma 3). The norm covers each head
    /// separately, unless [`ArchFlags::wide_query_norms`] is set.
    pub qk_norm: bool,
    /// Whether the head shares the token embedding's weights.
    pub tied_head: bool,
    /// Maximum sequence length in tokens.
    pub context_length: usize,
    /// Maximum distance of attention in tokens (Mistral 0.1), except in [`ArchFlags::global_layers`].
    pub sliding_window: Option<usize>,
    /// Deviations of the family from Llama.
    pub traits: ArchFlags,
    /// Experts in place of a feed-forward, if any.
    pub experts: Option<Experts>,
}

impl ModelConfig {
    /// Returns the experts of a block, or `None` for a plain feed-forward.
    #[must_use]
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.dense_layers.binary_search(&layer).is_err())
    }

    /// Returns the positions that a layer's attention reaches.
    #[must_use]
    pub fn reach(&self, layer: usize) -> AttentionReach {
        if self.traits.global_layers.binary_search(&layer).is_ok() {
            AttentionReach::Global
        } else {
            AttentionReach::Local
        }
    }

    /// Returns the number of leading features of a head that are rotated.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        self.traits.rotary_dim.unwrap_or(self.head_dim)
    }

    /// Whether the inputs of attention and feed-forward are normed.
    #[must_use]
    pub fn norms_inputs(&self) -> bool {
        self.traits.norms != BlockNorms::Behind
    }

    /// Whether the outputs of attention and feed-forward are normed before the residual addition.
    #[must_use]
    pub fn norms_updates(&self) -> bool {
        self.traits.norms != BlockNorms::Before
    }

    /// Returns window and score limit of each layer's attention.
    #[must_use]
    pub fn limits(&self) -> Vec<AttentionLimits> {
        (0..self.layers).map(|layer| self.limits_of(layer)).collect()
    }

    /// Returns window and score limit of one layer's attention.
    #[must_use]
    pub fn limits_of(&self, layer: usize) -> AttentionLimits {
        let window = self.sliding_window.filter(|_| self.reach(layer) == AttentionReach::Local);
        AttentionLimits { window, cap: self.traits.score_cap }
    }
}

/// Base [identities](super::identity) hash this text. Models without traits or experts omit these fields.
impl fmt::Debug for ModelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("ModelConfig");
        text.field("architecture", &self.architecture)
            .field("vocab_size", &self.vocab_size)
            .field("hidden_size", &self.hidden_size)
            .field("intermediate_size", &self.intermediate_size)
            .field("layers", &self.layers)
            .field("heads", &self.heads)
            .field("kv_heads", &self.kv_heads)
            .field("head_dim", &self.head_dim)
            .field("norm_eps", &self.norm_eps)
            .field("rope", &self.rope)
            .field("qk_norm", &self.qk_norm)
            .field("tied_head", &self.tied_head)
            .field("context_length", &self.context_length)
            .field("sliding_window", &self.sliding_window);
        if self.traits != ArchFlags::default() {
            text.field("traits", &self.traits);
        }
        if let Some(experts) = &self.experts {
            text.field("experts", experts);
        }
        text.finish()
    }
}
