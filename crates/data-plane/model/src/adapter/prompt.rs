//! Prompt tuning, P-tuning, multitask prompt tuning and CPT in PEFT's format: `prompt_embeddings`, embeddings
//! of virtual tokens before the prompt.
//!
//! PEFT saves the outputs of its encoders, so all four are stored alike. Only multitask prompt tuning has
//! factors besides, `prefix_task_cols`, `[tasks, tokens, ranks]`, and `prefix_task_rows`, `[tasks, ranks,
//! hidden]`, whose product scales the embeddings. Requests name no task, so there must be one.

use super::{
    error::AdapterError,
    limits::MAX_RANK,
    matrix::{StoredMatrix, StoredPrompt},
    options::ConfigOptions,
    prefix::{EMBEDDINGS, take_virtual_tokens},
    weight_file::WeightFile,
};
use crate::{shape::config::ModelConfig, sources::hf_names::scales_tokens_alone};

/// PEFT's names of these methods.
pub(super) const METHODS: [&str; 4] = ["PROMPT_TUNING", "P_TUNING", MULTITASK, "CPT"];
const MULTITASK: &str = "MULTITASK_PROMPT_TUNING";

const TASKS: &str = "num_tasks";

/// Options that describe how embeddings were made, and not the result.
const HISTORY: [&str; 20] = [
    "cpt_mask",
    "cpt_token_ids",
    "cpt_tokens_type_mask",
    "encoder_dropout",
    "encoder_hidden_size",
    "encoder_num_layers",
    "encoder_reparameterization_type",
    "num_attention_heads",
    "opt_loss_decay_factor",
    "opt_projection_epsilon",
    "opt_projection_format_epsilon",
    "opt_weighted_loss_type",
    "prompt_tuning_init",
    "prompt_tuning_init_state_dict_path",
    "prompt_tuning_init_task",
    "prompt_tuning_init_text",
    "tokenizer_kwargs",
    "tokenizer_name_or_path",
    "num_layers",
    "init_weights",
];

#[derive(Debug)]
pub(super) struct PromptConfig {
    tokens: usize,
    /// Ranks of the factors of multitask prompt tuning.
    task_ranks: Option<usize>,
}

impl PromptConfig {
    pub(super) fn from_options(
        method: &str,
        options: &mut ConfigOptions<'_>,
        model: &ModelConfig,
    ) -> Result<Self, AdapterError> {
        let expected = [("token_dim", model.hidden_size), ("num_transformer_submodules", 1)];
        let tokens = take_virtual_tokens(options, &expected)?;
        let task_ranks = if method == MULTITASK { Some(take_task_ranks(options)?) } else { None };
        options.refuse_the_rest(&HISTORY)?;
        Ok(Self { tokens, task_ranks })
    }

    pub(super) fn embeddings<'a>(
        &self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<StoredPrompt<'a>, AdapterError> {
        let (tokens, hidden) = (self.tokens, model.hidden_size);
        let stored = weights.required(EMBEDDINGS)?;
        let values = match self.task_ranks {
            None => weights.matrix(stored, [tokens, hidden])?,
            Some(ranks) => {
                let mut values = weights.numbers(stored, &[tokens, hidden])?;
                let [columns, rows] = ["cols", "rows"].map(|part| format!("prefix_task_{part}"));
                let (columns, rows) = (weights.required(&columns)?, weights.required(&rows)?);
                let columns = weights.numbers(columns, &[1, tokens, ranks])?;
                let rows = weights.numbers(rows, &[1, ranks, hidden])?;
                scale(&mut values, &columns, &rows, ranks);
                StoredMatrix::of_numbers(EMBEDDINGS.to_owned(), &values)
            }
        };
        Ok(StoredPrompt { tokens, is_scaled: !scales_tokens_alone(model), values })
    }
}

fn take_task_ranks(options: &mut ConfigOptions<'_>) -> Result<usize, AdapterError> {
    let tasks = options.count(TASKS)?.unwrap_or(1);
    if tasks != 1 {
        let problem = format!("is {tasks}, but requests name no task; save an adapter of one task");
        return Err(options.problem(TASKS, problem));
    }
    let ranks = options.count("num_ranks")?.unwrap_or(1);
    if (1..=MAX_RANK).contains(&ranks) {
        return Ok(ranks);
    }
    Err(options.problem("num_ranks", format!("is {ranks}, which is not between 1 and {MAX_RANK}")))
}

/// Multiplies `values`, `[tokens, hidden]`, with the product of `columns` and `rows` element by element.
fn scale(values: &mut [f32], columns: &[f32], rows: &[f32], ranks: usize) {
    let hidden = rows.len() / ranks;
    for (token, column) in values.chunks_exact_mut(hidden).zip(columns.chunks_exact(ranks)) {
        for (at, value) in token.iter_mut().enumerate() {
            *value *= column.iter().zip(rows[at..].iter().step_by(hidden)).map(|(x, y)| x * y).sum::<f32>();
        }
    }
}
