//! Token counts of a request and finish reasons of its choices, shared by answers, metrics and traces.

use serde::Serialize;

/// Reason why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    /// The model sampled an end token, a stop token or a stop string.
    Stop,
    /// The choice reached `max_tokens` or the context length.
    Length,
    /// The choice stopped as in `Stop` and contains tool calls.
    ToolCalls,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Generated tokens of all choices, including end tokens.
    pub completion_tokens: usize,
    /// Sum of prompt and completion tokens.
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
    pub completion_tokens_details: CompletionTokensDetails,
}

/// Origin of prompt tokens, nested as in OpenAI's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct PromptTokensDetails {
    /// Prompt tokens served from the prefix cache.
    pub cached_tokens: usize,
}

/// Kinds of generated tokens, nested as in OpenAI's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct CompletionTokensDetails {
    /// Tokens of the reasoning content and its delimiters.
    pub reasoning_tokens: usize,
}
