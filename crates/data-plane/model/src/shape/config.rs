//! What a model's files say about its shape: architectures as data over one forward pass.

use std::fmt;

use kernels::{attention::AttentionLimits, elementwise::Gate};

use super::experts::Experts;

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

/// Which positions a layer's attention reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionReach {
    /// All before it.
    Global,
    /// Those within the sliding window, if the model has one.
    Local,
}

/// Where a block norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BlockNorms {
    /// What attention and feed-forward are given.
    #[default]
    Before,
    /// That, and what they give, before it is added to the residual stream (Gemma).
    Around,
    /// What they give alone (OLMo 2).
    Behind,
}

/// What a family does that Llama does not: the default is Llama.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ArchFlags {
    /// What gates the feed-forward.
    pub gate: Gate,
    /// Where a block norms.
    pub norms: BlockNorms,
    /// Queries and keys are normed over all of their heads at once, if they are normed (OLMo 2).
    pub wide_query_norms: bool,
    /// What attention and feed-forward give is multiplied with this before it is added (Granite).
    pub update_scale: Option<f32>,
    /// Token embeddings are multiplied with this (Gemma, Granite).
    pub embedding_scale: Option<f32>,
    /// Scores are multiplied with this, if not with `1 / sqrt(head_dim)` (Gemma, Granite).
    pub score_scale: Option<f32>,
    /// Scores are kept within plus and minus this, smoothly (Gemma 2).
    pub score_cap: Option<f32>,
    /// Logits are kept within plus and minus this, smoothly (Gemma 2).
    pub logit_cap: Option<f32>,
    /// Logits are divided by this (Granite). The weights of the norm before the head are, when they are read: the head is linear, so
    /// logits come out divided, with any adapter.
    pub logit_divisor: Option<f32>,
    /// Layers that attend to everything, though others look back no farther than the window (Gemma); ascending.
    pub global_layers: Vec<usize>,
    /// The rotary embedding of the other layers, if they have one of their own (Gemma 3).
    pub local_rope: Option<Rope>,
    /// The first so many features of a head are rotated, if not all (Phi).
    pub rotary_dim: Option<usize>,
    /// What is rotated is multiplied with this (Phi's longrope).
    pub rotary_magnitude: Option<f32>,
}

/// Shape and constants of a decoder-only transformer with RMS norms and a gated feed-forward.
#[derive(Clone, PartialEq)]
pub struct ModelConfig {
    /// Name of the architecture as its files call it (`llama`, `mistral`, `granite`, `gemma3` and so on).
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
    /// q and k are normed before the rotary embedding, each head for itself but for [`ArchFlags::wide_query_norms`] (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// The head's weights are the token embedding's.
    pub tied_head: bool,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// Attention looks back this many tokens at most (Mistral 0.1), but for [`ArchFlags::global_layers`].
    pub sliding_window: Option<usize>,
    /// What it does that Llama does not.
    pub traits: ArchFlags,
    /// What stands in the place of a feed-forward, in mixtures of experts.
    pub experts: Option<Experts>,
}

impl ModelConfig {
    /// The experts of a block; `None` if it has a plain feed-forward.
    #[must_use]
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.dense_layers.binary_search(&layer).is_err())
    }

    /// How far a layer's attention reaches.
    #[must_use]
    pub fn reach(&self, layer: usize) -> AttentionReach {
        if self.traits.global_layers.binary_search(&layer).is_ok() {
            AttentionReach::Global
        } else {
            AttentionReach::Local
        }
    }

    /// How many features of a head are rotated, the first ones.
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        self.traits.rotary_dim.unwrap_or(self.head_dim)
    }

    /// Whether what attention and feed-forward are given is normed.
    #[must_use]
    pub fn norms_inputs(&self) -> bool {
        self.traits.norms != BlockNorms::Behind
    }

    /// Whether what they give is normed, before it is added.
    #[must_use]
    pub fn norms_updates(&self) -> bool {
        self.traits.norms != BlockNorms::Before
    }

    /// How far the attention of each layer looks back, and how large its scores get.
    #[must_use]
    pub fn limits(&self) -> Vec<AttentionLimits> {
        (0..self.layers).map(|layer| self.limits_of(layer)).collect()
    }

    /// The same of one layer.
    #[must_use]
    pub fn limits_of(&self, layer: usize) -> AttentionLimits {
        let window = self.sliding_window.filter(|_| self.reach(layer) == AttentionReach::Local);
        AttentionLimits { window, cap: self.traits.score_cap }
    }
}

/// Identities of bases are hashes of this text ([`identity`](super::identity)): of models without traits or experts it does not name them.
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
