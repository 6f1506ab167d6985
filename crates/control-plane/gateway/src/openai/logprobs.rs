//! Log-probabilities in OpenAI's two formats.

use shmproto::message::TokenOutput;

use super::{
    choice::ScoredToken,
    types::{
        Alternative, ChatLogprobs, RankedToken, TextLogprobs, TokenLikelihoods, TokenLogprob, TopLogprobs,
    },
};
use crate::text::Text;

/// How tokens are named in log-probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenNames {
    Text,
    /// Token ids as `token_id:5` (vLLM's `return_tokens_as_token_ids`), because two tokens may have one text.
    Ids,
}

impl TokenNames {
    fn of(self, text: &dyn Text, token: u32) -> String {
        match self {
            Self::Text => name(text.token_bytes(token)),
            Self::Ids => format!("token_id:{token}"),
        }
    }
}

/// JSON has no infinity; OpenAI sends this value for an impossible token.
const IMPOSSIBLE: f32 = -9999.0;

/// Returns the format of chat completions.
#[must_use]
pub fn chat<'a>(text: &'a dyn Text, names: TokenNames, scored: &[ScoredToken]) -> ChatLogprobs<'a> {
    let content = scored.iter().map(|ScoredToken { token, .. }| TokenLogprob {
        token: alternative(text, names, token.token, token.logprob),
        top_logprobs: token.top.iter().map(|(id, logprob)| alternative(text, names, *id, *logprob)).collect(),
    });
    ChatLogprobs { content: content.collect() }
}

/// Appends scores to `out` in the format of completions; `shift` is added to the offsets.
pub(crate) fn append(
    text: &dyn Text,
    names: TokenNames,
    scored: &[ScoredToken],
    shift: usize,
    out: &mut TextLogprobs,
) {
    for ScoredToken { offset, token } in scored {
        out.text_offset.push(shift + offset);
        out.tokens.push(names.of(text, token.token));
        out.token_logprobs.push(Some(finite(token.logprob)));
        out.top_logprobs.push(Some(top(text, names, token)));
    }
}

/// Appends the first token of a prompt, which has no probability because no token precedes it.
pub(crate) fn append_first(text: &dyn Text, names: TokenNames, token: u32, out: &mut TextLogprobs) {
    out.text_offset.push(0);
    out.tokens.push(names.of(text, token));
    out.token_logprobs.push(None);
    out.top_logprobs.push(None);
}

/// Returns the scores of each prompt token; `scores` begin at the prompt's second token.
pub(crate) fn of_prompt(text: &dyn Text, scores: &[TokenOutput]) -> Vec<Option<TokenLikelihoods>> {
    let ranked = |token: u32, logprob: f32, rank: Option<usize>| {
        (token, RankedToken { logprob: finite(logprob), rank, decoded_token: name(text.token_bytes(token)) })
    };
    let likely = |score: &TokenOutput| {
        let rank = score.top.iter().position(|(id, _)| *id == score.token).map(|index| index + 1);
        let own = ranked(score.token, score.logprob, rank);
        let others = score.top.iter().zip(1..).filter(|((id, _), _)| *id != score.token);
        let others = others.map(|((id, logprob), rank)| ranked(*id, *logprob, Some(rank)));
        Some(TokenLikelihoods(std::iter::once(own).chain(others).collect()))
    };
    std::iter::once(None).chain(scores.iter().map(likely)).collect()
}

/// Returns the most likely tokens and the chosen token; of tokens with equal text only the likelier stays.
fn top(text: &dyn Text, names: TokenNames, token: &TokenOutput) -> TopLogprobs {
    let mut entries: Vec<(String, f32)> = Vec::with_capacity(token.top.len() + 1);
    for (id, logprob) in token.top.iter().copied().chain([(token.token, token.logprob)]) {
        let name = names.of(text, id);
        if entries.iter().all(|(seen, _)| *seen != name) {
            entries.push((name, finite(logprob)));
        }
    }
    TopLogprobs(entries)
}

fn alternative(text: &dyn Text, names: TokenNames, token: u32, logprob: f32) -> Alternative<'_> {
    let bytes = text.token_bytes(token);
    Alternative { token: names.of(text, token), logprob: finite(logprob), bytes }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

/// Returns a token as text; invalid UTF-8 is spelled out, so that different tokens stay different.
pub(super) fn name(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut name, byte| {
            // Writing to a string cannot fail.
            let _ = write!(name, "\\x{byte:02x}");
            name
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_is_half_a_character_is_spelt_in_bytes() {
        assert_eq!(name(&[0xe2, 0x9f]), r"bytes:\xe2\x9f");
        assert_eq!(name("né".as_bytes()), "né");
    }

    #[test]
    fn an_impossible_token_has_a_number_that_json_can_hold() {
        assert!((finite(f32::NEG_INFINITY) - IMPOSSIBLE).abs() < f32::EPSILON);
    }
}
