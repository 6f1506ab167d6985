//! Rows of some tokens in PEFT's format, for the embedding, the head, or both: the type TRAINABLE_TOKENS, and
//! `trainable_token_indices` of a LoRA.
//!
//! `trainable_tokens_delta`, `[tokens, hidden]`, replaces rows of the base, despite its name. If the base
//! ties embedding and head, rows of the embedding are rows of the head too.

use serde_json::Value;

use super::{
    error::AdapterError,
    limits::MAX_TRAINED_TOKENS,
    options::ConfigOptions,
    patterns::is_tail,
    selection::{Selected, Selection},
    stored_vocabulary::StoredTokenRows,
    weight_file::WeightFile,
};
use crate::{
    shape::{config::ModelConfig, source::Target},
    sources::hf_names::{EMBEDDING, module_name},
};

/// PEFT's name of the method that trains rows alone.
pub(super) const METHOD: &str = "TRAINABLE_TOKENS";

/// Option of this method, and that of a LoRA.
const ALONE: &str = "token_indices";
pub(super) const BESIDE_LORA: &str = "trainable_token_indices";

const ROWS: &str = "trainable_tokens_delta";

/// Tokens with rows of their own, in the order of the rows.
#[derive(Debug, Default)]
pub(super) struct TrainedTokens {
    embedding: Option<Vec<u32>>,
    head: Option<Vec<u32>>,
}

impl TrainedTokens {
    /// Reads the options of an adapter that has rows alone.
    pub(super) fn from_options(
        options: &mut ConfigOptions<'_>,
        vocab_size: usize,
    ) -> Result<Self, AdapterError> {
        if !options.has("target_modules") {
            options.set("target_modules", EMBEDDING.into());
        }
        let selection = Selection::from_options(options)?;
        let Some(list) = options.take(ALONE) else { return Err(options.problem(ALONE, "is missing")) };
        let tokens = checked(options, ALONE, &list, vocab_size)?;
        options.refuse_the_rest(&["init_weights"])?;
        let of = |module: &str| {
            let selected = selection.of(module)?;
            Ok::<_, AdapterError>((selected == Selected::Yes).then(|| tokens.clone()))
        };
        let (embedding, head) = (of(EMBEDDING)?, of(&module_name(0, Target::LmHead))?);
        if embedding.is_none() && head.is_none() {
            return Err(options.problem("target_modules", "selects neither embed_tokens nor lm_head"));
        }
        Ok(Self { embedding, head })
    }

    /// Takes the option of a LoRA: a list for the embedding, or a list for each module.
    pub(super) fn beside_lora(
        options: &mut ConfigOptions<'_>,
        vocab_size: usize,
    ) -> Result<Self, AdapterError> {
        let mut found = Self::default();
        match options.take(BESIDE_LORA) {
            None => {}
            Some(Value::Object(lists)) => {
                for (module, list) in &lists {
                    let place = if is_tail(EMBEDDING, module) {
                        &mut found.embedding
                    } else if is_tail(&module_name(0, Target::LmHead), module) {
                        &mut found.head
                    } else {
                        let problem =
                            format!("has `{}`, which is no embedding or head", module.escape_debug());
                        return Err(options.problem(BESIDE_LORA, problem));
                    };
                    *place = Some(checked(options, BESIDE_LORA, list, vocab_size)?);
                }
            }
            Some(list) => found.embedding = Some(checked(options, BESIDE_LORA, &list, vocab_size)?),
        }
        Ok(found)
    }

    pub(super) fn is_any(&self) -> bool {
        self.embedding.is_some() || self.head.is_some()
    }

    /// Returns the rows of embedding and head.
    pub(super) fn read<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<[Option<StoredTokenRows<'a>>; 2], AdapterError> {
        let embedding = self.embedding.as_ref().map(|tokens| rows(weights, model, EMBEDDING, tokens));
        let embedding = embedding.transpose()?;
        let head = module_name(0, Target::LmHead);
        let is_shared = model.tied_head && self.embedding.is_some();
        if is_shared && self.head.as_ref().is_none_or(|tokens| Some(tokens) == self.embedding.as_ref()) {
            // PEFT may store the shared rows a second time.
            drop(weights.take(&format!("{head}.{ROWS}")));
            return Ok([embedding.clone(), embedding]);
        }
        let own = self.head.as_ref().map(|tokens| rows(weights, model, &head, tokens));
        Ok([embedding, own.transpose()?])
    }
}

fn rows<'a>(
    weights: &mut WeightFile<'a>,
    model: &ModelConfig,
    module: &str,
    tokens: &[u32],
) -> Result<StoredTokenRows<'a>, AdapterError> {
    let stored = weights.required(&format!("{module}.{ROWS}"))?;
    let values = weights.matrix(stored, [tokens.len(), model.hidden_size])?;
    Ok(StoredTokenRows { tokens: tokens.to_vec(), values })
}

/// Returns a list of different tokens of the vocabulary.
fn checked(
    options: &ConfigOptions<'_>,
    option: &str,
    list: &Value,
    vocab_size: usize,
) -> Result<Vec<u32>, AdapterError> {
    let of_vocabulary = |id: &Value| {
        let token = u32::try_from(id.as_u64()?).ok()?;
        ((token as usize) < vocab_size).then_some(token)
    };
    let list = list.as_array().map_or(&[][..], Vec::as_slice);
    if list.is_empty() || list.len() > MAX_TRAINED_TOKENS {
        let problem = format!("must be a list of 1 to {MAX_TRAINED_TOKENS} tokens");
        return Err(options.problem(option, problem));
    }
    let tokens: Option<Vec<u32>> = list.iter().map(of_vocabulary).collect();
    let tokens = tokens.ok_or_else(|| {
        options.problem(option, format!("has an entry that is no token id below {vocab_size}"))
    })?;
    let mut sorted = tokens.clone();
    sorted.sort_unstable();
    if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(options.problem(option, "names a token twice"));
    }
    Ok(tokens)
}
