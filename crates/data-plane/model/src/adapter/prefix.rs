//! Prefix tuning and cartridges in PEFT's format: `prompt_embeddings`, keys and values of virtual tokens for
//! every layer.
//!
//! PEFT saves the output of its encoder, so an adapter with a projection (`prefix_projection`) is stored as
//! one without. Keys enter the KV cache unchanged: neither rotated nor normed.

use super::{
    error::AdapterError, limits::MAX_VIRTUAL_TOKENS, matrix::StoredPrefix, options::ConfigOptions,
    weight_file::WeightFile,
};
use crate::shape::config::ModelConfig;

/// The only tensor of a prefix, `[virtual tokens, layers * 2 * key heads * head_dim]`.
pub(super) const EMBEDDINGS: &str = "prompt_embeddings";
const VIRTUAL_TOKENS: &str = "num_virtual_tokens";

/// Options that describe how a prefix was made, and not its result.
const HISTORY: [&str; 4] = ["encoder_hidden_size", "init_weights", "num_frozen_tokens", "prefix_projection"];

#[derive(Debug)]
pub(super) struct PrefixConfig {
    tokens: usize,
}

impl PrefixConfig {
    pub(super) fn from_options(
        options: &mut ConfigOptions<'_>,
        model: &ModelConfig,
    ) -> Result<Self, AdapterError> {
        // With grouped-query attention, PEFT counts the key heads.
        let expected = [
            ("num_layers", model.layers),
            ("num_attention_heads", model.kv_heads),
            ("token_dim", model.kv_heads * model.head_dim),
            ("num_transformer_submodules", 1),
        ];
        let tokens = take_virtual_tokens(options, &expected)?;
        options.refuse_the_rest(&HISTORY)?;
        Ok(Self { tokens })
    }

    pub(super) fn embeddings<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<StoredPrefix<'a>, AdapterError> {
        let (layers, width) = (model.layers, model.kv_heads * model.head_dim);
        let stored = weights.required(EMBEDDINGS)?;
        let values = weights.matrix(stored, [self.tokens, layers * 2 * width])?;
        Ok(StoredPrefix { tokens: self.tokens, layers, width, values })
    }
}

/// Takes the number of virtual tokens, and checks the sizes of the base that the options name.
pub(super) fn take_virtual_tokens(
    options: &mut ConfigOptions<'_>,
    expected: &[(&str, usize)],
) -> Result<usize, AdapterError> {
    let tokens = options.count(VIRTUAL_TOKENS)?.unwrap_or(0);
    if tokens == 0 || tokens > MAX_VIRTUAL_TOKENS {
        let problem = format!("is {tokens}, and 1 to {MAX_VIRTUAL_TOKENS} virtual tokens are supported");
        return Err(options.problem(VIRTUAL_TOKENS, problem));
    }
    for &(option, wanted) in expected {
        if let Some(found) = options.count(option)?
            && found != wanted
        {
            let problem = format!("is {found} instead of {wanted}; use an adapter for this base model");
            return Err(options.problem(option, problem));
        }
    }
    Ok(tokens)
}
