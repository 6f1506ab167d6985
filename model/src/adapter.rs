//! A low-rank adapter as its files hold it.

use crate::{generation::Generation, source::Target};

/// One adapted linear layer: `y += scale * B (A x)`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraModule {
    /// Transformer block, 0 for the head.
    pub layer: usize,
    /// Which linear layer.
    pub target: Target,
    /// The true rank.
    pub rank: usize,
    /// `alpha / rank`, or `alpha / sqrt(rank)` for rsLoRA.
    pub scale: f32,
    /// `[rank, in]`, row after row.
    pub a: Vec<f32>,
    /// `[out, rank]`, row after row.
    pub b: Vec<f32>,
}

/// An adapter, read and checked against the base model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Content hash of weights and configuration.
    pub generation: Generation,
    /// Sorted by layer, then target; at most one for each pair.
    pub modules: Vec<LoraModule>,
    /// `base_model_name_or_path` of its configuration, for messages.
    pub base_model: Option<String>,
    /// True if every A and B was stored in 16 bits, so that 16 bits hold it exactly.
    pub stored_in_16_bits: bool,
}
