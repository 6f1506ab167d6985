//! An adapter, and what it does to the base model: one of three methods, each with its numbers.

use std::sync::Arc;

use types::Generation;

use super::{invocation::Invocation, kind::AdapterKind, vocabulary::VocabularyChanges};
use crate::shape::{config::ModelConfig, source::Target};

/// An adapter, read and checked against the base model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Content hash of weights and configuration.
    pub generation: Generation,
    /// What it does.
    pub method: MethodWeights,
    /// `base_model_name_or_path` of its configuration, for messages.
    pub base_model: Option<String>,
    /// True if every number was stored in 16 bits, so that 16 bits hold it exactly.
    pub stored_in_16_bits: bool,
}

impl Adapter {
    /// Its low-rank layers; none if it is of another kind.
    #[must_use]
    pub fn modules(&self) -> &[LoraModule] {
        match &self.method {
            MethodWeights::Lora(modules) | MethodWeights::Activated(modules, _) => modules,
            MethodWeights::Ia3(_) | MethodWeights::Prefix(_) => &[],
        }
    }
}

/// What of the base a draft computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftShape {
    /// The first so many layers; at least one, and no more than there are.
    pub layers: usize,
    /// The tokens it guesses among, in ascending order, one at least; `None` for all of them.
    pub shortlist: Option<Arc<[u32]>>,
}

/// A draft adapter, read and checked against the base model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftAdapter {
    /// What of the base it computes.
    pub shape: DraftShape,
    /// What it changes there, a LoRA. Its generation is that of all of this; factors of the head are over the whole vocabulary.
    pub adapter: Adapter,
}

/// A DoRA, read and checked against the base model's shape. It answers once it has met the base's weights
/// ([`over`](Self::over)).
#[derive(Debug, Clone, PartialEq)]
pub struct DoraAdapter {
    /// The low-rank part of it, a LoRA. Its generation is that of all of this.
    pub adapter: Adapter,
    /// `[out]` of each of its modules.
    pub magnitudes: Vec<Vec<f32>>,
}

/// A LoRA that changes the token embedding or the head as well, read and checked against the base model's shape. Of weights that
/// embedding and head share, the one that it does not name stays as it is.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabularyAdapter {
    /// What it does to linear layers, a LoRA; there need be none. Its generation is that of all of this.
    pub adapter: Adapter,
    /// What it does to embedding and head.
    pub changes: VocabularyChanges,
}

/// An adapter of any kind.
#[derive(Debug, Clone, PartialEq)]
pub enum AnyAdapter {
    /// Requests are answered by it.
    Answers(Adapter),
    /// It guesses for the base, whoever is answered.
    Drafts(DraftAdapter),
    /// Requests are answered by it, over the base's weights.
    Decomposed(DoraAdapter),
    /// Requests are answered by it, over an embedding or a head that it changes too.
    Vocabulary(VocabularyAdapter),
}

impl AnyAdapter {
    /// What it is, and what it changes: of a DoRA, before it has met the base's weights.
    #[must_use]
    pub fn adapter(&self) -> &Adapter {
        match self {
            Self::Answers(adapter) => adapter,
            Self::Drafts(draft) => &draft.adapter,
            Self::Decomposed(dora) => &dora.adapter,
            Self::Vocabulary(vocabulary) => &vocabulary.adapter,
        }
    }

    /// Its method's name.
    #[must_use]
    pub fn kind(&self) -> AdapterKind {
        match self {
            Self::Decomposed(_) => AdapterKind::Dora,
            Self::Vocabulary(vocabulary) if vocabulary.changes.saved().is_empty() => AdapterKind::Embedding,
            Self::Vocabulary(_) => AdapterKind::Saved,
            _ => self.adapter().method.kind(),
        }
    }

    /// What it does to embedding and head, if it does.
    #[must_use]
    pub fn vocabulary(&self) -> Option<&VocabularyChanges> {
        if let Self::Vocabulary(vocabulary) = self { Some(&vocabulary.changes) } else { None }
    }

    /// How much of the base it changes: linear layers, and embedding and head where they are changed otherwise.
    #[must_use]
    pub fn modules(&self) -> usize {
        self.adapter().method.linear_layers() + self.vocabulary().map_or(0, VocabularyChanges::modules)
    }

    /// Bytes it takes in memory at least, however it is kept there.
    #[must_use]
    pub fn least_bytes(&self) -> u64 {
        let beside = self.vocabulary().map_or(0, |changes| changes.bytes() as u64);
        self.adapter().method.least_bytes() + beside
    }
}

impl From<Adapter> for AnyAdapter {
    fn from(adapter: Adapter) -> Self {
        Self::Answers(adapter)
    }
}

impl DraftShape {
    /// The shape of the model that a draft for a base of shape `base` is.
    #[must_use]
    pub fn config(&self, base: &ModelConfig) -> ModelConfig {
        let vocab_size = self.shortlist.as_ref().map_or(base.vocab_size, |ids| ids.len());
        ModelConfig { layers: self.layers, vocab_size, tied_head: false, ..base.clone() }
    }
}

impl DraftAdapter {
    /// The adapter with the head's factors cut to the shortlist: that of a model of [`DraftShape::config`].
    #[must_use]
    pub fn shortlisted(&self) -> Adapter {
        let mut adapter = self.adapter.clone();
        if let (Some(ids), MethodWeights::Lora(modules)) = (&self.shape.shortlist, &mut adapter.method) {
            modules
                .iter_mut()
                .filter(|module| module.target == Target::LmHead)
                .for_each(|head| cut(head, ids));
        }
        adapter
    }
}

/// Keeps the outputs that `ids` name.
fn cut(head: &mut LoraModule, ids: &[u32]) {
    let rank = head.rank;
    head.b = ids.iter().flat_map(|&id| &head.b[id as usize * rank..][..rank]).copied().collect();
}

/// What an adapter does.
#[derive(Debug, Clone, PartialEq)]
pub enum MethodWeights {
    /// Sorted by layer, then target; at most one for each pair.
    Lora(Vec<LoraModule>),
    /// The same, from where it is invoked.
    Activated(Vec<LoraModule>, Invocation),
    /// Vectors of linear layers.
    Ia3(Arc<Scales>),
    /// Keys and values of virtual tokens.
    Prefix(Arc<Prefix>),
}

impl MethodWeights {
    /// Which method it is.
    #[must_use]
    pub fn kind(&self) -> AdapterKind {
        match self {
            Self::Lora(_) => AdapterKind::Lora,
            Self::Activated(..) => AdapterKind::Activated,
            Self::Ia3(_) => AdapterKind::Ia3,
            Self::Prefix(_) => AdapterKind::Prefix,
        }
    }

    /// The largest rank; 0 for what has none.
    #[must_use]
    pub fn rank(&self) -> usize {
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) => {
                modules.iter().map(|module| module.rank).max().unwrap_or(0)
            }
            Self::Ia3(_) | Self::Prefix(_) => 0,
        }
    }

    /// Linear layers whose outputs it changes.
    #[must_use]
    pub fn linear_layers(&self) -> usize {
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) => modules.len(),
            Self::Ia3(scales) => scales.vectors.len(),
            // Keys and values of each layer.
            Self::Prefix(prefix) => 2 * prefix.layers,
        }
    }

    /// Tokens that stand before a prompt without being part of it.
    #[must_use]
    pub fn virtual_tokens(&self) -> usize {
        match self {
            Self::Lora(_) | Self::Activated(..) | Self::Ia3(_) => 0,
            Self::Prefix(prefix) => prefix.tokens,
        }
    }

    /// What invokes it, if it applies only from there.
    #[must_use]
    pub fn invocation(&self) -> Option<&Invocation> {
        if let Self::Activated(_, invocation) = self { Some(invocation) } else { None }
    }

    /// Bytes it takes in memory at least, however it is kept there.
    #[must_use]
    pub fn least_bytes(&self) -> u64 {
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) => {
                2 * modules.iter().map(|module| module.a.len() + module.b.len()).sum::<usize>() as u64
            }
            Self::Ia3(scales) => scales.bytes() as u64,
            Self::Prefix(prefix) => prefix.bytes() as u64,
        }
    }
}

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

/// What of a linear layer a vector scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaledSide {
    /// `y = W (l * x) + bias`.
    Input,
    /// `y = l * (W x + bias)`.
    Output,
}

/// A scaled linear layer (IA3).
#[derive(Debug, Clone, PartialEq)]
pub struct ScaleVector {
    /// Transformer block, 0 for the head.
    pub layer: usize,
    /// Which linear layer.
    pub target: Target,
    /// Whether its inputs or its outputs are scaled.
    pub side: ScaledSide,
    /// `[in]` or `[out]`.
    pub values: Vec<f32>,
}

/// The vectors of an IA3 adapter, or of a DoRA.
#[derive(Debug, Clone, PartialEq)]
pub struct Scales {
    vectors: Vec<ScaleVector>,
    /// What is added behind: by layer, then target.
    offsets: Vec<((usize, Target), Vec<f32>)>,
}

impl Scales {
    /// Vectors in any order, at most one for a linear layer. Inputs are scaled only where no other linear layer shares
    /// them: those of `o`, `down` and the head.
    #[must_use]
    pub fn new(mut vectors: Vec<ScaleVector>) -> Self {
        vectors.sort_by_key(|vector| (vector.layer, vector.target));
        Self { vectors, offsets: Vec::new() }
    }

    /// The same, with vectors that are added to outputs once these are scaled; sorted by layer, then target.
    pub(super) fn with_offsets(self, offsets: Vec<((usize, Target), Vec<f32>)>) -> Self {
        Self { offsets, ..self }
    }

    /// What is added to the outputs of a linear layer.
    #[must_use]
    pub fn offset(&self, layer: usize, target: Target) -> Option<&[f32]> {
        let at = self.offsets.binary_search_by_key(&(layer, target), |(place, _)| *place).ok()?;
        Some(&self.offsets[at].1)
    }

    /// Whether anything is added.
    #[must_use]
    pub fn have_offsets(&self) -> bool {
        !self.offsets.is_empty()
    }

    /// By layer, then target.
    #[must_use]
    pub fn vectors(&self) -> &[ScaleVector] {
        &self.vectors
    }

    /// What scales this side of a linear layer.
    #[must_use]
    pub fn get(&self, layer: usize, target: Target, side: ScaledSide) -> Option<&[f32]> {
        let at = self.vectors.binary_search_by_key(&(layer, target), |vector| (vector.layer, vector.target));
        let vector = self.vectors.get(at.ok()?)?;
        (vector.side == side).then_some(&vector.values)
    }

    /// The same as [`vectors`](Self::vectors); only their numbers are to be changed.
    pub(crate) fn vectors_mut(&mut self) -> &mut [ScaleVector] {
        &mut self.vectors
    }

    /// Bytes of all vectors.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let vectors = self.vectors.iter().map(|vector| &vector.values);
        let all = vectors.chain(self.offsets.iter().map(|(_, values)| values));
        all.map(|values| size_of_val(&values[..])).sum()
    }
}

/// Keys and values of virtual tokens (prefix tuning). The keys are not rotated: they stand where they are whatever their
/// position. The first token of a prompt has the position behind them.
#[derive(Debug, Clone, PartialEq)]
pub struct Prefix {
    /// Virtual tokens.
    pub tokens: usize,
    /// Transformer blocks of the model.
    pub layers: usize,
    /// Elements of all key heads of a token.
    pub width: usize,
    /// `[tokens, layers, 2, width]`: key heads, then value heads.
    pub values: Vec<f32>,
}

impl Prefix {
    /// Keys and values of a virtual token in a layer, `[2, width]`.
    ///
    /// # Panics
    ///
    /// If there is no such token or layer.
    #[must_use]
    pub fn keys_and_values(&self, token: usize, layer: usize) -> &[f32] {
        let width = 2 * self.width;
        &self.values[(token * self.layers + layer) * width..][..width]
    }

    /// The same of each virtual token, layer by layer, to be changed.
    pub(crate) fn by_layer_mut(&mut self) -> Vec<Vec<&mut [f32]>> {
        let mut layers: Vec<Vec<_>> = (0..self.layers).map(|_| Vec::with_capacity(self.tokens)).collect();
        for token in self.values.chunks_exact_mut(self.layers * 2 * self.width) {
            for (layer, values) in layers.iter_mut().zip(token.chunks_exact_mut(2 * self.width)) {
                layer.push(values);
            }
        }
        layers
    }

    /// Bytes of all keys and values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }
}
