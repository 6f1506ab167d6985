//! A draft adapter: a LoRA with which the base's first layers predict the tokens of all layers.
//!
//! The files have PEFT's format. The configuration names the number of layers, `"holobiont_draft": {"layers":
//! K}`. The weights may hold a *shortlist* of predictable tokens, `draft.shortlist` (I64 `[n]`, ascending).
//! The head's factors cover the whole vocabulary in the file; the executor takes the listed rows.

use std::sync::Arc;

use super::{error::AdapterError, method::DraftShape, options::ConfigOptions, weight_file::WeightFile};
use crate::shape::config::ModelConfig;

/// Option that makes a LoRA a draft adapter, with its only key.
const OPTION: &str = "holobiont_draft";
const LAYERS: &str = "layers";

/// Takes the number of draft layers from `options`, or `None` without the option.
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

/// Returns the shape of a draft of `layers` layers, with the shortlist taken from `weights`.
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

/// Returns the ids if they are ascending tokens of the vocabulary and not empty, else the first bad entry.
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
