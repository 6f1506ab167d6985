//! A draft adapter: the base's first layers, adapted to guess what all of them will say.
//!
//! It is a LoRA in PEFT's format. Its configuration says beside how many layers it is for, `"holobiont_draft": {"layers": K}`;
//! its weights may hold a *shortlist*, `draft.shortlist` (I64 `[n]`, ascending): the tokens it guesses among. Low-rank factors of the head are
//! over the whole vocabulary in the file, and whoever serves it takes the rows that are on the list.

use std::sync::Arc;

use super::{error::AdapterError, method::DraftShape, options::ConfigOptions, weight_file::WeightFile};
use crate::shape::config::ModelConfig;

/// The option that makes a LoRA a draft, and what it holds.
const OPTION: &str = "holobiont_draft";
const LAYERS: &str = "layers";

/// The layers that `options` say, if they make a draft for a base of so many.
pub(super) fn take_layers(
    options: &mut ConfigOptions<'_>,
    base_layers: usize,
) -> Result<Option<usize>, AdapterError> {
    let layers = options.count_in(OPTION, LAYERS)?;
    match layers {
        Some(layers) if layers == 0 || layers > base_layers => {
            Err(AdapterError::DraftLayers { path: options.path().to_path_buf(), layers, base_layers })
        }
        layers => Ok(layers),
    }
}

/// What of the base a draft of so many layers computes: with the shortlist that is taken out of `weights`, if there is one.
pub(super) fn take_shape(
    weights: &mut WeightFile<'_>,
    model: &ModelConfig,
    layers: usize,
) -> Result<DraftShape, AdapterError> {
    let shortlist = weights.take_shortlist()?.map(|ids| {
        check(&ids, model.vocab_size).map_err(|(index, id)| AdapterError::Shortlist {
            path: weights.path().to_path_buf(),
            index,
            id,
            vocab_size: model.vocab_size,
        })
    });
    Ok(DraftShape { layers, shortlist: shortlist.transpose()? })
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
