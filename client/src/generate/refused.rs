//! Why a sequence is not answered.

use crate::error::CallError;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The executor is gone, or refuses.
    #[error(transparent)]
    Call(#[from] CallError),
    /// There is nothing to go on from.
    #[error("the prompt is empty: write something")]
    EmptyPrompt,
    /// A token that the model does not have.
    #[error("token {token} is not of this model, whose vocabulary has {vocab_size}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Tokens there are.
        vocab_size: usize,
    },
    /// No token fits behind the prompt.
    #[error("the prompt has {prompt} tokens and the context holds {context_length}: shorten it")]
    PromptTooLong {
        /// Tokens of the prompt, with those of the adapter.
        prompt: usize,
        /// Tokens of the context.
        context_length: usize,
    },
    /// The KV pool is too small.
    #[error(
        "the sequence needs {needed} KV blocks and there are {total}: raise --kv-bytes or lower --max-tokens"
    )]
    PoolTooSmall {
        /// Blocks it needs at its end.
        needed: usize,
        /// Blocks there are.
        total: usize,
    },
    /// What was computed are no numbers.
    #[error(
        "what was computed after {tokens} tokens are no numbers: the adapter's weights, or the model, overflow"
    )]
    NotFinite {
        /// Tokens before.
        tokens: usize,
    },
}
