//! An adapter in memory, with the weights of its method.

use std::sync::Arc;

use types::AdapterVersion;

use super::{
    classification::ClassificationHead,
    invocation::Invocation,
    kind::AdapterKind,
    virtual_tokens::{Prefix, PromptEmbeddings},
    vocabulary::VocabularyChanges,
};
use crate::shape::{config::ModelConfig, source::Target};

/// An adapter, read and checked against the base model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Adapter version: content hash of weights and configuration.
    pub generation: AdapterVersion,
    /// Method of the adapter, with its weights.
    pub method: MethodWeights,
    /// The configuration's `base_model_name_or_path`, for messages.
    pub base_model: Option<String>,
    /// True if every value was stored in 16 bits, so that 16 bits hold it exactly.
    pub stored_in_16_bits: bool,
}

impl Adapter {
    /// Returns the low-rank layers, or none for other methods.
    #[must_use]
    pub fn modules(&self) -> &[LoraModule] {
        match &self.method {
            MethodWeights::Lora(modules) | MethodWeights::Activated(modules, _) => modules,
            MethodWeights::Ia3(_) | MethodWeights::Prefix(_) | MethodWeights::Prompt(_) => &[],
        }
    }

    /// True if the adapter changes experts.
    #[must_use]
    pub fn changes_experts(&self) -> bool {
        self.modules().iter().any(|module| module.target.is_of_expert())
    }
}

/// The part of the base that a draft computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftShape {
    /// Number of leading layers, from 1 to the base's number of layers.
    pub layers: usize,
    /// Tokens that the draft can predict, ascending and not empty; `None` for all tokens.
    pub shortlist: Option<Arc<[u32]>>,
}

/// A draft adapter, read and checked against the base model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftAdapter {
    /// The part of the base that it computes.
    pub shape: DraftShape,
    /// LoRA of these layers. The version covers the whole draft, and head factors the whole vocabulary.
    pub adapter: Adapter,
}

/// A DoRA, checked against the base model's shape. [`over`](Self::over) combines it with the base's weights.
#[derive(Debug, Clone, PartialEq)]
pub struct DoraAdapter {
    /// The low-rank part, whose version covers the whole DoRA.
    pub adapter: Adapter,
    /// Magnitudes of each module, shape `[out]`.
    pub magnitudes: Vec<Vec<f32>>,
}

/// A LoRA that also changes the token embedding or the head, checked against the base model's shape. If
/// embedding and head share weights, the one that the adapter does not name stays unchanged.
#[derive(Debug, Clone, PartialEq)]
pub struct VocabularyAdapter {
    /// LoRA of linear layers, possibly empty. The version covers the whole adapter.
    pub adapter: Adapter,
    /// Changes of embedding and head.
    pub changes: VocabularyChanges,
}

/// A LoRA with a classification head (PEFT's task `SEQ_CLS`), checked against the base model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassificationAdapter {
    /// LoRA of linear layers, possibly empty. The version covers the whole adapter.
    pub adapter: Adapter,
    /// The head, which replaces that of the base.
    pub head: Arc<ClassificationHead>,
}

/// A LoRA with biases, or biases alone, checked against the base model's shape.
#[derive(Debug, Clone, PartialEq)]
pub struct BiasedAdapter {
    /// LoRA of linear layers, possibly empty. The version covers the whole adapter.
    pub adapter: Adapter,
    /// Offsets of outputs, without scales.
    pub biases: Scales,
}

/// An adapter of any kind.
#[derive(Debug, Clone, PartialEq)]
pub enum AnyAdapter {
    /// An adapter that answers requests.
    Answers(Adapter),
    /// An adapter that drafts tokens for the base.
    Drafts(DraftAdapter),
    /// An answering adapter that needs the base's weights.
    Decomposed(DoraAdapter),
    /// An answering adapter that also changes embedding or head.
    Vocabulary(VocabularyAdapter),
    /// An adapter that classifies prompts.
    Classifies(ClassificationAdapter),
    /// An answering adapter with biases.
    Biased(BiasedAdapter),
}

impl AnyAdapter {
    /// Returns the linear-layer part of the adapter; a DoRA's is not combined with the base's weights yet.
    #[must_use]
    pub fn adapter(&self) -> &Adapter {
        match self {
            Self::Answers(adapter) => adapter,
            Self::Drafts(draft) => &draft.adapter,
            Self::Decomposed(dora) => &dora.adapter,
            Self::Vocabulary(vocabulary) => &vocabulary.adapter,
            Self::Classifies(classifier) => &classifier.adapter,
            Self::Biased(biased) => &biased.adapter,
        }
    }

    /// Returns the kind of the method.
    #[must_use]
    pub fn kind(&self) -> AdapterKind {
        match self {
            Self::Decomposed(_) => AdapterKind::Dora,
            Self::Classifies(_) => AdapterKind::Classification,
            Self::Vocabulary(vocabulary) if !vocabulary.changes.saved().is_empty() => AdapterKind::Saved,
            Self::Vocabulary(vocabulary) if vocabulary.changes.have_token_rows() => AdapterKind::Tokens,
            Self::Vocabulary(_) => AdapterKind::Embedding,
            Self::Biased(_) => AdapterKind::Biased,
            _ => self.adapter().method.kind(),
        }
    }

    /// Returns the changes of embedding and head, if any.
    #[must_use]
    pub fn vocabulary(&self) -> Option<&VocabularyChanges> {
        if let Self::Vocabulary(vocabulary) = self { Some(&vocabulary.changes) } else { None }
    }

    /// Returns the classification head, if any.
    #[must_use]
    pub fn classification_head(&self) -> Option<&Arc<ClassificationHead>> {
        if let Self::Classifies(classifier) = self { Some(&classifier.head) } else { None }
    }

    /// Returns the number of changed modules: linear layers, and separately changed embedding and heads.
    #[must_use]
    pub fn modules(&self) -> usize {
        let biased = if let Self::Biased(biased) = self { biased.biases_alone() } else { 0 };
        let vocabulary = self.vocabulary().map_or(0, VocabularyChanges::modules);
        let heads = usize::from(self.classification_head().is_some());
        self.adapter().method.linear_layers() + biased + vocabulary + heads
    }

    /// Returns a lower bound of the bytes in memory, for every memory layout.
    #[must_use]
    pub fn least_bytes(&self) -> u64 {
        let biases = if let Self::Biased(biased) = self { biased.biases.bytes() } else { 0 };
        let vocabulary = self.vocabulary().map_or(0, VocabularyChanges::bytes);
        let head = self.classification_head().map_or(0, |head| head.bytes());
        self.adapter().method.least_bytes() + (biases + vocabulary + head) as u64
    }
}

impl BiasedAdapter {
    /// Returns the number of linear layers with a bias and without low-rank factors.
    fn biases_alone(&self) -> usize {
        let adapted: Vec<_> = self.adapter.modules().iter().map(|it| (it.layer, it.target)).collect();
        self.biases.offsets.iter().filter(|(place, _)| !adapted.contains(place)).count()
    }
}

impl From<Adapter> for AnyAdapter {
    fn from(adapter: Adapter) -> Self {
        Self::Answers(adapter)
    }
}

impl DraftShape {
    /// Returns the configuration of the draft model for a base of shape `base`.
    #[must_use]
    pub fn config(&self, base: &ModelConfig) -> ModelConfig {
        let vocab_size = self.shortlist.as_ref().map_or(base.vocab_size, |ids| ids.len());
        ModelConfig { layers: self.layers, vocab_size, tied_head: false, ..base.clone() }
    }
}

impl DraftAdapter {
    /// Returns the adapter with head factors cut to the shortlist, for a [`DraftShape::config`] model.
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

fn cut(head: &mut LoraModule, ids: &[u32]) {
    let rank = head.rank;
    head.b = ids.iter().flat_map(|&id| &head.b[id as usize * rank..][..rank]).copied().collect();
}

/// Weights of an adapter by method.
#[derive(Debug, Clone, PartialEq)]
pub enum MethodWeights {
    /// LoRA modules sorted by layer, then target; at most one for each pair.
    Lora(Vec<LoraModule>),
    /// LoRA modules that apply from the invocation on.
    Activated(Vec<LoraModule>, Invocation),
    /// Scaling vectors of linear layers (IA3).
    Ia3(Arc<Scales>),
    /// Keys and values of virtual tokens (prefix tuning).
    Prefix(Arc<Prefix>),
    /// Embeddings of virtual tokens (prompt tuning).
    Prompt(Arc<PromptEmbeddings>),
}

impl MethodWeights {
    /// Returns the kind of the method.
    #[must_use]
    pub fn kind(&self) -> AdapterKind {
        match self {
            Self::Lora(_) => AdapterKind::Lora,
            Self::Activated(..) => AdapterKind::Activated,
            Self::Ia3(_) => AdapterKind::Ia3,
            Self::Prefix(_) => AdapterKind::Prefix,
            Self::Prompt(_) => AdapterKind::Prompt,
        }
    }

    /// Returns the largest rank, or 0 without low-rank factors.
    #[must_use]
    pub fn rank(&self) -> usize {
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) => {
                modules.iter().map(|module| module.rank).max().unwrap_or(0)
            }
            Self::Ia3(_) | Self::Prefix(_) | Self::Prompt(_) => 0,
        }
    }

    /// Returns the number of linear layers with changed outputs.
    #[must_use]
    pub fn linear_layers(&self) -> usize {
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) => modules.len(),
            Self::Ia3(scales) => scales.vectors.len(),
            // A prefix changes the keys and values of each layer.
            Self::Prefix(prefix) => 2 * prefix.layers,
            // The embeddings of virtual tokens are one.
            Self::Prompt(_) => 1,
        }
    }

    /// Returns the number of virtual tokens before a prompt.
    #[must_use]
    pub fn virtual_tokens(&self) -> usize {
        match self {
            Self::Lora(_) | Self::Activated(..) | Self::Ia3(_) => 0,
            Self::Prefix(prefix) => prefix.tokens,
            Self::Prompt(prompt) => prompt.tokens,
        }
    }

    /// Returns the invocation of an activated LoRA.
    #[must_use]
    pub fn invocation(&self) -> Option<&Invocation> {
        if let Self::Activated(_, invocation) = self { Some(invocation) } else { None }
    }

    /// Returns a lower bound of the bytes in memory, for every memory layout.
    #[must_use]
    pub fn least_bytes(&self) -> u64 {
        match self {
            Self::Lora(modules) | Self::Activated(modules, _) => {
                2 * modules.iter().map(|module| module.a.len() + module.b.len()).sum::<usize>() as u64
            }
            Self::Ia3(scales) => scales.bytes() as u64,
            Self::Prefix(prefix) => prefix.bytes() as u64,
            Self::Prompt(prompt) => prompt.bytes() as u64,
        }
    }
}

/// One adapted linear layer: `y += scale * B (A x)`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraModule {
    /// Transformer block, 0 for the head.
    pub layer: usize,
    /// Linear layer of the block.
    pub target: Target,
    /// Rank of the factors, without padding.
    pub rank: usize,
    /// `alpha / rank`, or `alpha / sqrt(rank)` for rsLoRA.
    pub scale: f32,
    /// Matrix A, `[rank, in]`, row-major.
    pub a: Vec<f32>,
    /// Matrix B, `[out, rank]`, row-major.
    pub b: Vec<f32>,
}

/// Side of a linear layer that a vector scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaledSide {
    /// Scales the inputs: `y = W (l * x) + bias`.
    Input,
    /// Scales the outputs: `y = l * (W x + bias)`.
    Output,
}

/// A scaled linear layer (IA3).
#[derive(Debug, Clone, PartialEq)]
pub struct ScaleVector {
    /// Transformer block, 0 for the head.
    pub layer: usize,
    /// Linear layer of the block.
    pub target: Target,
    /// Whether inputs or outputs are scaled.
    pub side: ScaledSide,
    /// Scale of each feature, `[in]` or `[out]`.
    pub values: Vec<f32>,
}

/// The vectors of an IA3 adapter or of a DoRA, and biases.
#[derive(Debug, Clone, PartialEq)]
pub struct Scales {
    vectors: Vec<ScaleVector>,
    /// Offsets that are added to outputs after any scaling, sorted by layer, then target.
    offsets: Vec<((usize, Target), Vec<f32>)>,
}

impl Scales {
    /// Builds scales from vectors in any order, at most one for each linear layer. Input vectors must belong
    /// to `o`, `down` or the head, whose inputs no other linear layer shares.
    #[must_use]
    pub fn new(mut vectors: Vec<ScaleVector>) -> Self {
        vectors.sort_by_key(|vector| (vector.layer, vector.target));
        Self { vectors, offsets: Vec::new() }
    }

    /// Adds offsets for outputs, after any scaling; `offsets` must be sorted by layer, then target.
    pub(super) fn with_offsets(self, offsets: Vec<((usize, Target), Vec<f32>)>) -> Self {
        Self { offsets, ..self }
    }

    /// Returns the offset of a linear layer's outputs, after any scaling.
    #[must_use]
    pub fn offset(&self, layer: usize, target: Target) -> Option<&[f32]> {
        let at = self.offsets.binary_search_by_key(&(layer, target), |(place, _)| *place).ok()?;
        Some(&self.offsets[at].1)
    }

    /// Whether any offset is present.
    #[must_use]
    pub fn have_offsets(&self) -> bool {
        !self.offsets.is_empty()
    }

    /// Returns the vectors, sorted by layer, then target.
    #[must_use]
    pub fn vectors(&self) -> &[ScaleVector] {
        &self.vectors
    }

    /// Returns the vector for `side` of a linear layer.
    #[must_use]
    pub fn get(&self, layer: usize, target: Target, side: ScaledSide) -> Option<&[f32]> {
        let at = self.vectors.binary_search_by_key(&(layer, target), |vector| (vector.layer, vector.target));
        let vector = self.vectors.get(at.ok()?)?;
        (vector.side == side).then_some(&vector.values)
    }

    /// Returns the [`vectors`](Self::vectors) for changes of their values only, which keep the order.
    pub(crate) fn vectors_mut(&mut self) -> &mut [ScaleVector] {
        &mut self.vectors
    }

    /// Returns the bytes of all vectors and offsets.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let vectors = self.vectors.iter().map(|vector| &vector.values);
        let all = vectors.chain(self.offsets.iter().map(|(_, values)| values));
        all.map(|values| size_of_val(&values[..])).sum()
    }
}
