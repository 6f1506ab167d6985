//! The trait of weight sources, common to GGUF and safetensors.

use kernels::TensorType;

use crate::shape::{
    config::ModelConfig,
    experts::{ExpertId, ExpertPart, ExpertTarget},
};

/// A linear layer of the network that an adapter may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Attention query projection of a layer.
    Q,
    /// Attention key projection of a layer.
    K,
    /// Attention value projection of a layer.
    V,
    /// Attention output projection of a layer.
    O,
    /// Gate projection of the feed-forward.
    Gate,
    /// Up projection of the feed-forward.
    Up,
    /// Down projection of the feed-forward.
    Down,
    /// The language-model head; its layer index is 0.
    LmHead,
    /// Linear layer of an expert.
    Expert(ExpertId, ExpertTarget),
}

impl Target {
    /// True for the linear layers of experts.
    #[must_use]
    pub fn is_of_expert(self) -> bool {
        matches!(self, Self::Expert(..))
    }
}

/// A tensor of the network, independent of its name in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorId {
    /// Token embedding, `[vocab, hidden]`.
    TokenEmbedding,
    /// Norm before the head, `[hidden]`.
    OutputNorm,
    /// Norm before a layer's attention, `[hidden]`.
    AttentionNorm(usize),
    /// Norm before a layer's feed-forward, `[hidden]`.
    FeedForwardNorm(usize),
    /// Norm of a layer's attention output, `[hidden]`.
    AttentionUpdateNorm(usize),
    /// Norm of a layer's feed-forward output, `[hidden]`.
    FeedForwardUpdateNorm(usize),
    /// Norm of query heads, `[head_dim]` or the width of all heads.
    QueryNorm(usize),
    /// Norm of key heads, `[head_dim]` or the width of all heads.
    KeyNorm(usize),
    /// Weights of a linear layer, `[out, in]`; for `LmHead` the layer is 0.
    Weight(usize, Target),
    /// Bias of a linear layer, `[out]`; absent in most models.
    Bias(usize, Target),
    /// Sinks of a layer's attention, `[heads]`; absent in most models.
    Sinks(usize),
    /// Router of a layer with experts, `[experts, hidden]`.
    Router(usize),
    /// Bias of a router, `[experts]`; absent in most models.
    RouterBias(usize),
    /// Weights of a linear layer of an expert, `[out, in]`.
    Expert(usize, ExpertId, ExpertPart),
    /// Bias of a linear layer of an expert, `[out]`; absent in most models.
    ExpertBias(usize, ExpertId, ExpertPart),
}

impl TensorId {
    pub(crate) fn is_norm(self) -> bool {
        match self {
            Self::OutputNorm
            | Self::AttentionNorm(_)
            | Self::FeedForwardNorm(_)
            | Self::AttentionUpdateNorm(_)
            | Self::FeedForwardUpdateNorm(_)
            | Self::QueryNorm(_)
            | Self::KeyNorm(_) => true,
            Self::TokenEmbedding
            | Self::Weight(..)
            | Self::Bias(..)
            | Self::Sinks(_)
            | Self::Router(_)
            | Self::RouterBias(_)
            | Self::Expert(..)
            | Self::ExpertBias(..) => false,
        }
    }
}

/// A stored tensor: `rows` rows of `cols` elements each, row-major (a vector has one row).
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<'a> {
    /// Element encoding of `data`.
    pub kind: TensorType,
    /// Output features, the number of rows.
    pub rows: usize,
    /// Input features, the length of a row.
    pub cols: usize,
    /// `rows` times `kind.row_bytes(cols)` bytes; owned if the reader had to change the data.
    pub data: std::borrow::Cow<'a, [u8]>,
}

/// A model's files, opened and checked.
pub trait WeightSource {
    /// Returns the shape that the files declare.
    fn config(&self) -> &ModelConfig;

    /// Returns a tensor, or `None` if the files do not have it. The size is checked against the file; the
    /// caller must check the shape against the configuration.
    fn tensor(&self, id: TensorId) -> Option<Tensor<'_>>;

    /// Returns the encoding of a tensor without reading it, or `None` as for [`tensor`](Self::tensor).
    fn kind(&self, id: TensorId) -> Option<TensorType>;

    /// Allows the source to release cached memory of a tensor that will not be read again soon.
    fn release(&self, _id: TensorId) {}

    /// Returns false if a file changed since it was opened; data read since then may mix two models.
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
