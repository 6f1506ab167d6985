//! A draft adapter: the base's first layers, adapted to guess what all of them will say.
//!
//! It is a LoRA in PEFT's format. Its configuration says beside how many layers it is for, `"holobiont_draft": {"layers": K}`;
//! its weights may hold a *shortlist*, `draft.shortlist` (I64 `[n]`, ascending): the tokens it guesses among. Low-rank factors of the head are
//! over the whole vocabulary in the file, and whoever serves it takes the rows that are on the list.

use std::sync::Arc;

use super::{
    error::AdapterError,
    method::{Adapter, LoraModule, Method},
    options::Options,
    weight_file::WeightFile,
};
use crate::shape::{config::ModelConfig, source::Target};

/// The option that makes a LoRA a draft, and what it holds.
const OPTION: &str = "holobiont_draft";
const LAYERS: &str = "layers";

/// The tensor with the ids of the tokens that a draft guesses among.
pub(super) const SHORTLIST: &str = "draft.shortlist";

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

/// An adapter of either kind.
#[derive(Debug, Clone, PartialEq)]
pub enum AnyAdapter {
    /// Requests are answered by it.
    Answers(Adapter),
    /// It guesses for the base, whoever is answered.
    Drafts(DraftAdapter),
}

impl AnyAdapter {
    /// What it changes, and what it is, alone.
    #[must_use]
    pub fn into_adapter(self) -> Adapter {
        match self {
            Self::Answers(adapter) => adapter,
            Self::Drafts(draft) => draft.adapter,
        }
    }

    /// What it changes, and what it is.
    #[must_use]
    pub fn adapter(&self) -> &Adapter {
        match self {
            Self::Answers(adapter) => adapter,
            Self::Drafts(draft) => &draft.adapter,
        }
    }
}

impl From<Adapter> for AnyAdapter {
    fn from(adapter: Adapter) -> Self {
        Self::Answers(adapter)
    }
}

/// The layers that `options` say, if they make a draft.
pub(super) fn take_layers(
    options: &mut Options<'_>,
    model: &ModelConfig,
) -> Result<Option<usize>, AdapterError> {
    let layers = options.count_in(OPTION, LAYERS)?;
    match layers {
        Some(layers) if layers == 0 || layers > model.layers => Err(AdapterError::DraftLayers {
            path: options.path().to_path_buf(),
            layers,
            base_layers: model.layers,
        }),
        layers => Ok(layers),
    }
}

impl DraftShape {
    /// Takes the shortlist out of `weights`, of a draft of so many layers, and checks it.
    pub(super) fn take(
        weights: &mut WeightFile<'_>,
        model: &ModelConfig,
        layers: usize,
    ) -> Result<Self, AdapterError> {
        let shortlist = weights.take_shortlist()?.map(|ids| {
            check(&ids, model.vocab_size).map_err(|(index, id)| AdapterError::Shortlist {
                path: weights.path().to_path_buf(),
                index,
                id,
                vocab_size: model.vocab_size,
            })
        });
        Ok(Self { layers, shortlist: shortlist.transpose()? })
    }

    /// The shape of the model that a draft for a base of shape `base` is.
    #[must_use]
    pub fn config(&self, base: &ModelConfig) -> ModelConfig {
        let vocab_size = self.shortlist.as_ref().map_or(base.vocab_size, |ids| ids.len());
        ModelConfig { layers: self.layers, vocab_size, tied_head: false, ..base.clone() }
    }
}

/// The ids, if they are some, ascend, and are of the vocabulary; else the first that is wrong.
fn check(ids: &[i64], vocab_size: usize) -> Result<Arc<[u32]>, (usize, i64)> {
    let mut least = 0;
    let mut checked = Vec::with_capacity(ids.len());
    for (index, &id) in ids.iter().enumerate() {
        match u32::try_from(id) {
            Ok(token) if id >= least && (token as usize) < vocab_size => checked.push(token),
            _ => return Err((index, id)),
        }
        least = id + 1;
    }
    if checked.is_empty() { Err((0, -1)) } else { Ok(checked.into()) }
}

impl DraftAdapter {
    /// The adapter with the head's factors cut to the shortlist: that of a model of [`DraftShape::config`].
    #[must_use]
    pub fn shortlisted(&self) -> Adapter {
        let mut adapter = self.adapter.clone();
        if let (Some(ids), Method::Lora(modules)) = (&self.shape.shortlist, &mut adapter.method) {
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
