//! Errors of generation.

use crate::error::CallError;

/// Reason why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The executor is gone, or refuses.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The prompt has no tokens.
    #[error("the prompt is empty: write something")]
    EmptyPrompt,
    /// The prompt has a token that the model lacks.
    #[error("token {token} is not in this model's vocabulary of {vocab_size} tokens")]
    UnknownToken {
        /// Id of the token.
        token: u32,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// The prompt fills the whole context.
    #[error("the prompt has {prompt} tokens, and the context {context_length}: shorten the prompt")]
    PromptTooLong {
        /// Tokens of the prompt, with the adapter's virtual tokens.
        prompt: usize,
        /// Maximum number of tokens in the context.
        context_length: usize,
    },
    /// The block pool is too small.
    #[error(
        "the sequence needs {needed} KV blocks, but there are {total}: raise --kv-bytes or lower --max-tokens"
    )]
    PoolTooSmall {
        /// Number of blocks that the sequence needs.
        needed: usize,
        /// Number of available blocks.
        total: usize,
    },
    /// The computed logits are not finite.
    #[error(
        "the logits after {tokens} tokens are not numbers: the adapter's weights, or the model, overflow"
    )]
    NotFinite {
        /// Number of tokens before the failure.
        tokens: usize,
    },
}
