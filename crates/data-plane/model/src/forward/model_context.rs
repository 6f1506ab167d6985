//! Facts about a model for the pass: shape, norms, rotary frequencies, routers.

use std::sync::Arc;

use kernels::{PackedMatrix, attention::QkvLayout, elementwise::Norm};

use crate::shape::{config::ModelConfig, experts::Experts, rope::RopeTable};

/// A model without its large weights, as [`run`](super::run) needs it.
#[derive(Debug)]
pub struct ModelContext {
    /// Shape of the model.
    pub config: ModelConfig,
    /// Norm weights of the model.
    pub norms: Norms,
    /// Rotary frequencies of the model.
    pub rope: RopeTable,
    /// Router of each block, `None` for blocks without experts.
    pub(crate) routers: Vec<Option<Router>>,
    /// Constants of each layer's attention.
    pub(crate) attention: AttentionConstants,
}

/// Router of a block with experts.
#[derive(Debug, Clone)]
pub(crate) struct Router {
    pub(crate) matrix: Arc<PackedMatrix>,
    pub(crate) bias: Option<Vec<f32>>,
}

/// Constants of each layer's attention.
#[derive(Debug, Clone, Default)]
pub(crate) struct AttentionConstants {
    /// Origin of each layer's keys, `[kv_heads, head_dim]`; empty for layers without.
    ///
    /// A KV cache of few bits stores keys less their origin. The softmax of scores does not change, because
    /// all scores of a query change by the same number; but large biases of keys no longer cost the bits of
    /// what differs between keys. A sink would not change with the scores, so models with sinks have none.
    pub(crate) key_origins: Vec<Vec<f32>>,
    /// Sinks of each layer, `[heads]`; empty for models without.
    pub(crate) sinks: Vec<Vec<f32>>,
}

impl AttentionConstants {
    /// Returns the constants of the first `layers` layers.
    pub(crate) fn first_layers(&self, layers: usize) -> Self {
        let first = |all: &[Vec<f32>]| all.iter().take(layers).cloned().collect();
        Self { key_origins: first(&self.key_origins), sinks: first(&self.sinks) }
    }

    /// Returns the sinks of a layer, or none.
    pub(crate) fn sinks(&self, layer: usize) -> &[f32] {
        self.sinks.get(layer).map_or(&[], Vec::as_slice)
    }
}

impl ModelContext {
    pub(crate) fn new(
        config: ModelConfig,
        norms: Norms,
        routers: Vec<Option<Router>>,
        attention: AttentionConstants,
    ) -> Self {
        let rope = RopeTable::new(&config);
        Self { config, norms, rope, routers, attention }
    }

    /// Returns the model of the first `layers` blocks, with the output norm of the whole model.
    ///
    /// # Panics
    /// If the model has fewer blocks.
    #[must_use]
    pub fn first_layers(mut self, layers: usize) -> Self {
        assert!(layers <= self.config.layers, "blocks of the model");
        self.config.layers = layers;
        self.routers.truncate(layers);
        self.attention = self.attention.first_layers(layers);
        let Norms { attention, feed_forward, attention_update, feed_forward_update, query, key, output: _ } =
            &mut self.norms;
        [attention, feed_forward, attention_update, feed_forward_update, query, key]
            .into_iter()
            .for_each(|of_blocks| of_blocks.truncate(layers));
        self
    }

    pub(crate) fn router(&self, layer: usize) -> Option<(&Router, &Experts)> {
        Some((self.routers.get(layer)?.as_ref()?, self.config.experts_of(layer)?))
    }

    /// Returns the columns of queries, keys and values in a row.
    #[must_use]
    pub fn qkv_layout(&self) -> QkvLayout {
        let ModelConfig { heads, kv_heads, head_dim, .. } = self.config;
        QkvLayout { heads, kv_heads, head_dim }
    }

    /// Returns the factor of attention scores, which is multiplied into the queries.
    #[must_use]
    pub fn score_scale(&self) -> f32 {
        self.config.traits.score_scale.unwrap_or(1.0 / (self.config.head_dim as f32).sqrt())
    }

    /// Returns the norm at `site`, or `None` if the model has none there.
    #[must_use]
    pub fn norm(&self, site: NormSite) -> Option<Norm<'_>> {
        let norms = &self.norms;
        let weight = match site {
            NormSite::Attention(layer) => norms.attention.get(layer),
            NormSite::FeedForward(layer) => norms.feed_forward.get(layer),
            NormSite::AttentionUpdate(layer) => norms.attention_update.get(layer),
            NormSite::FeedForwardUpdate(layer) => norms.feed_forward_update.get(layer),
            NormSite::Output => Some(&norms.output),
        };
        weight.map(|weight| Norm { weight, eps: self.config.norm_eps })
    }
}

/// Norm weights of a model, which stay with the process that runs the pass.
#[derive(Debug, Clone)]
pub struct Norms {
    /// Before attention, `[hidden]` for each layer; empty without such norms.
    pub attention: Vec<Vec<f32>>,
    /// Before the feed-forward, `[hidden]` for each layer; empty without such norms.
    pub feed_forward: Vec<Vec<f32>>,
    /// On the output of attention, `[hidden]` for each layer; empty without such norms.
    pub attention_update: Vec<Vec<f32>>,
    /// On the output of the feed-forward, `[hidden]` for each layer; empty without such norms.
    pub feed_forward_update: Vec<Vec<f32>>,
    /// On queries, `[head_dim]` or all heads for each layer; empty without qk-norm.
    pub query: Vec<Vec<f32>>,
    /// On keys, `[head_dim]` or all heads for each layer; empty without qk-norm.
    pub key: Vec<Vec<f32>>,
    /// Before the head, shape `[hidden]`.
    pub output: Vec<f32>,
}

/// Place of a norm in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormSite {
    /// Before the attention of a layer.
    Attention(usize),
    /// Before the feed-forward of a layer.
    FeedForward(usize),
    /// On the attention's output, before the residual addition.
    AttentionUpdate(usize),
    /// On the feed-forward's output, before the residual addition.
    FeedForwardUpdate(usize),
    /// Before the head of the model.
    Output,
}
