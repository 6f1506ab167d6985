//! What a pass knows of a model: its shape, its norms, its rotary frequencies.

use std::sync::Arc;

use kernels::{PackedMatrix, attention::QkvLayout, elementwise::Norm};

use crate::shape::{config::ModelConfig, experts::Experts, rope::RopeTable};

/// A model without its large weights: what [`run`](super::run) needs to know.
#[derive(Debug)]
pub struct ModelContext {
    /// The model's shape.
    pub config: ModelConfig,
    /// Its norms.
    pub norms: Norms,
    /// Its rotary frequencies.
    pub rope: RopeTable,
    /// The router of each block that has experts.
    pub(crate) routers: Vec<Option<Arc<PackedMatrix>>>,
}

impl ModelContext {
    /// A model of this shape with these norms, and a router for each block that has experts.
    pub(crate) fn new(config: ModelConfig, norms: Norms, routers: Vec<Option<Arc<PackedMatrix>>>) -> Self {
        let rope = RopeTable::new(&config);
        Self { config, norms, rope, routers }
    }

    /// The model that ends behind its first `layers` blocks, with the norm and the head of the whole one.
    ///
    /// # Panics
    /// If it has not so many.
    #[must_use]
    pub fn first_layers(mut self, layers: usize) -> Self {
        assert!(layers <= self.config.layers, "blocks of the model");
        self.config.layers = layers;
        self.routers.truncate(layers);
        let Norms { attention, feed_forward, attention_update, feed_forward_update, query, key, output: _ } =
            &mut self.norms;
        [attention, feed_forward, attention_update, feed_forward_update, query, key]
            .into_iter()
            .for_each(|of_blocks| of_blocks.truncate(layers));
        self
    }

    /// The router of a block, and the experts it sends rows to; `None` if the block has none.
    pub(crate) fn router(&self, layer: usize) -> Option<(&PackedMatrix, &Experts)> {
        Some((self.routers.get(layer)?.as_deref()?, self.config.experts_of(layer)?))
    }

    /// Where queries, keys and values lie in a row.
    #[must_use]
    pub fn qkv_layout(&self) -> QkvLayout {
        let ModelConfig { heads, kv_heads, head_dim, .. } = self.config;
        QkvLayout { heads, kv_heads, head_dim }
    }

    /// What scores are multiplied with; queries carry it.
    #[must_use]
    pub fn score_scale(&self) -> f32 {
        self.config.traits.score_scale.unwrap_or(1.0 / (self.config.head_dim as f32).sqrt())
    }

    /// A norm, if the model has one there.
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

/// The small tensors of a model, which whoever runs the pass holds itself.
#[derive(Debug, Clone)]
pub struct Norms {
    /// `[hidden]` of each layer, before attention; empty without such norms.
    pub attention: Vec<Vec<f32>>,
    /// `[hidden]` of each layer, before the feed-forward; empty without such norms.
    pub feed_forward: Vec<Vec<f32>>,
    /// `[hidden]` of each layer, of what attention gives; empty without such norms.
    pub attention_update: Vec<Vec<f32>>,
    /// `[hidden]` of each layer, of what the feed-forward gives; empty without such norms.
    pub feed_forward_update: Vec<Vec<f32>>,
    /// `[head_dim]` of each layer, or as wide as all heads; empty without qk-norm.
    pub query: Vec<Vec<f32>>,
    /// The same of keys.
    pub key: Vec<Vec<f32>>,
    /// `[hidden]`, before the head.
    pub output: Vec<f32>,
}

/// Which norm of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormSite {
    /// Before a layer's attention.
    Attention(usize),
    /// Before a layer's feed-forward.
    FeedForward(usize),
    /// Of what a layer's attention gives, before it is added.
    AttentionUpdate(usize),
    /// Of what a layer's feed-forward gives, before it is added.
    FeedForwardUpdate(usize),
    /// Before the head.
    Output,
}
