//! Errors of conversations that become tokens.

use crate::{chat_template::TemplateError, tokenizer::EncodeError};

/// Why a conversation could not be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The tokenizer refused the rendered text.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// No mark character is left with which to quote the names of special tokens.
    #[error(
        "the messages use all characters U+F0000 to U+F00FF and names of special tokens; remove one of them"
    )]
    NoMark,
    /// The template refused the conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The template would leave out a system message.
    #[error(
        "this model's chat template ignores system messages after the first message; put their text into \
         the first system message, or into a user's"
    )]
    LaterSystem,
}
