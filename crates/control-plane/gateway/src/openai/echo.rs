//! The prompt echoed before a completion, with its log-probabilities.

use shmproto::message::TokenOutput;
use text::detokenize::TextStart;

use super::{
    choice::ScoredToken,
    generation_request::PromptInput,
    logprobs::{TokenNames, append, append_first},
    types::TextLogprobs,
};
use crate::text::Text;

#[derive(Debug, PartialEq)]
pub(crate) struct EchoedPrompt {
    /// Prompt as the caller wrote it, or decoded from token ids.
    pub text: String,
    /// Length in characters, which is the offset of the completion.
    pub chars: usize,
    /// Set if log-probabilities were requested.
    pub logprobs: Option<TextLogprobs>,
}

/// Echoes `prompt`; `scores` belong to the tokens from the second on and are `None` if not requested.
#[must_use]
pub(crate) fn echo(
    text: &dyn Text,
    prompt: &PromptInput,
    names: TokenNames,
    scores: Option<Vec<TokenOutput>>,
) -> EchoedPrompt {
    let mut decoder = text.decoder(TextStart::Beginning, &[]);
    let mut decoded = String::new();
    let mut offsets = Vec::with_capacity(prompt.tokens.len());
    let mut chars = 0;
    for token in &prompt.tokens {
        offsets.push(chars);
        let piece = decoder.push(*token);
        chars += piece.chars().count();
        decoded.push_str(piece);
    }
    decoded.push_str(decoder.finish());
    let logprobs = scores.map(|scores| logprobs(text, prompt, names, &offsets, scores));
    let text = prompt.text.clone().unwrap_or(decoded);
    EchoedPrompt { chars: text.chars().count(), text, logprobs }
}

fn logprobs(
    text: &dyn Text,
    prompt: &PromptInput,
    names: TokenNames,
    offsets: &[usize],
    scores: Vec<TokenOutput>,
) -> TextLogprobs {
    let mut out = TextLogprobs::default();
    if let Some(first) = prompt.tokens.first() {
        append_first(text, names, *first, &mut out);
    }
    let rest = offsets.iter().skip(1).zip(scores);
    let scored: Vec<ScoredToken> = rest.map(|(&offset, token)| ScoredToken { offset, token }).collect();
    append(text, names, &scored, 0, &mut out);
    out
}
