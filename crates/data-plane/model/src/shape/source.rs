//! Where weights come from: one trait over GGUF and safetensors.

use kernels::TensorType;

use crate::shape::{
    config::ModelConfig,
    experts::{ExpertId, ExpertPart},
};

/// A linear layer of the network that an adapter may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Attention query projection of a layer.
    Q,
    /// Attention key projection.
    K,
    /// Attention value projection.
    V,
    /// Attention output projection.
    O,
    /// Feed-forward gate.
    Gate,
    /// Feed-forward up.
    Up,
    /// Feed-forward down.
    Down,
    /// The language-model head (has no layer; its layer index is 0).
    LmHead,
}

/// A tensor of the network, whatever its file calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorId {
    /// `[vocab, hidden]`.
    TokenEmbedding,
    /// `[hidden]`, the norm before the head.
    OutputNorm,
    /// `[hidden]`, the norm before a layer's attention.
    AttentionNorm(usize),
    /// `[hidden]`, the norm before a layer's feed-forward.
    FeedForwardNorm(usize),
    /// `[hidden]`, the norm of what a layer's attention gives.
    AttentionUpdateNorm(usize),
    /// `[hidden]`, the norm of what a layer's feed-forward gives.
    FeedForwardUpdateNorm(usize),
    /// `[head_dim]`, the norm of query heads.
    QueryNorm(usize),
    /// `[head_dim]`, the norm of key heads.
    KeyNorm(usize),
    /// `[out, in]` of a linear layer; for `LmHead` the layer is 0.
    Weight(usize, Target),
    /// `[out]` of a linear layer; absent in most models.
    Bias(usize, Target),
    /// `[experts, hidden]` of a layer: what its rows are sent to experts by.
    Router(usize),
    /// `[out, in]` of a linear layer of one of a layer's experts.
    Expert(usize, ExpertId, ExpertPart),
}

impl TensorId {
    /// Whether it is the weights of a norm.
    pub(crate) fn is_norm(self) -> bool {
        match self {
            Self::OutputNorm
            | Self::AttentionNorm(_)
            | Self::FeedForwardNorm(_)
            | Self::AttentionUpdateNorm(_)
            | Self::FeedForwardUpdateNorm(_)
            | Self::QueryNorm(_)
            | Self::KeyNorm(_) => true,
            Self::TokenEmbedding | Self::Weight(..) | Self::Bias(..) | Self::Router(_) | Self::Expert(..) => {
                false
            }
        }
    }
}

/// A stored tensor: `rows` rows of `cols` elements each, row after row (a vector has one row).
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<'a> {
    /// Encoding of `data`.
    pub kind: TensorType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// `rows` times `kind.row_bytes(cols)` bytes. Owned where the loader had to permute rows.
    pub data: std::borrow::Cow<'a, [u8]>,
}

/// A model's files, opened and checked.
pub trait WeightSource {
    /// The shape the files declare.
    fn config(&self) -> &ModelConfig;

    /// A tensor, or `None` if the files have none of that id. Its size has been checked against the file;
    /// its shape is checked by the caller against the configuration.
    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>>;

    /// How a tensor is encoded, found out without reading it; `None` as for [`tensor`](Self::tensor).
    fn kind(&self, id: TensorId) -> Option<TensorType>;

    /// The tensor has been copied and will not be read again soon: memory that only caches it may be given back.
    fn release(&self, _id: TensorId) {}

    /// False if a file was written to since it was opened: what was read meanwhile may be of two models.
    fn unchanged(&self) -> bool {
        true
    }
}

impl<S: WeightSource + ?Sized> WeightSource for Box<S> {
    fn config(&self) -> &ModelConfig {
        (**self).config()
    }

    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>> {
        (**self).tensor(id)
    }

    fn kind(&self, id: TensorId) -> Option<TensorType> {
        (**self).kind(id)
    }

    fn release(&self, id: TensorId) {
        (**self).release(id);
    }

    fn unchanged(&self) -> bool {
        (**self).unchanged()
    }
}
