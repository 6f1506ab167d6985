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
    #[error("token {token} is not of this model, whose vocabulary has {vocab_size}")]
    UnknownToken {
        /// Id of the token.
        token: u32,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// The prompt fills the whole context.
    #[error("the prompt has {prompt} tokens and the context holds {context_length}: shorten it")]
    PromptTooLong {
        /// Tokens of the prompt, with the adapter's virtual tokens.
        prompt: usize,
        /// Maximum number of tokens in the context.
        context_length: usize,
    },
    /// The block pool is too small.
    #[error(
        "the sequence needs {needed} KV blocks and there are {total}: raise --kv-bytes or lower --max-tokens"
    )]
    PoolTooSmall {
        /// Number of blocks that the sequence needs.
        needed: usize,
        /// Number of available blocks.
        total: usize,
    },
    /// The computed logits are not finite.
    #[error(
        "what was computed after {tokens} tokens are no numbers: the adapter's weights, or the model, overflow"
    )]
    NotFinite {
        /// Number of tokens before the failure.
        tokens: usize,
    },
}
