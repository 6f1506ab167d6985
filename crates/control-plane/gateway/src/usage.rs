//! What a request came to: its tokens, and why each choice ended. Answers, figures and traces say it alike.

use serde::Serialize;

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model's end token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the context length.
    Length,
    /// As `Stop`, and the answer calls tools.
    ToolCalls,
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Tokens generated over all choices, end tokens included.
    pub completion_tokens: usize,
    /// Both together.
    pub total_tokens: usize,
    /// What of the prompts was not computed anew.
    pub prompt_tokens_details: PromptTokensDetails,
    /// What of the answers was thought.
    pub completion_tokens_details: CompletionTokensDetails,
}

/// Where prompt tokens came from, as OpenAI nests it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens served from the prefix cache.
    pub cached_tokens: usize,
}

/// What generated tokens were, as OpenAI nests it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    /// Tokens before an answer: its thought, and what stands around that.
    pub reasoning_tokens: usize,
}
