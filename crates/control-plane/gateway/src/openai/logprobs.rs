//! Log-probabilities in OpenAI's two shapes.

use shmproto::message::TokenOutput;

use super::{
    choice::ScoredToken,
    types::{
        Alternative, ChatLogprobs, RankedToken, TextLogprobs, TokenLikelihoods, TokenLogprob, TopLogprobs,
    },
};
use crate::text::Text;

/// How tokens are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenNames {
    /// By their text.
    Text,
    /// By their numbers, as `token_id:5` (`return_tokens_as_token_ids`, as vLLM has it): two tokens may have one text.
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

/// JSON has no infinity; OpenAI sends this for what cannot happen.
const IMPOSSIBLE: f32 = -9999.0;

/// The chat shape.
#[must_use]
pub fn chat<'a>(text: &'a dyn Text, names: TokenNames, scored: &[ScoredToken]) -> ChatLogprobs<'a> {
    let content = scored.iter().map(|ScoredToken { token, .. }| TokenLogprob {
        token: alternative(text, names, token.token, token.logprob),
        top_logprobs: token.top.iter().map(|(id, logprob)| alternative(text, names, *id, *logprob)).collect(),
    });
    ChatLogprobs { content: content.collect() }
}

/// The shape of completions, appended to `out`. `shift` is added to the offsets.
pub fn append(
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

/// The first token of a prompt: nothing comes before it, so it has no probability.
pub fn append_first(text: &dyn Text, names: TokenNames, token: u32, out: &mut TextLogprobs) {
    out.text_offset.push(0);
    out.tokens.push(names.of(text, token));
    out.token_logprobs.push(None);
    out.top_logprobs.push(None);
}

/// Token by token, how likely a prompt was; `scores` are those of its tokens from the second on.
pub fn of_prompt(text: &dyn Text, scores: &[TokenOutput]) -> Vec<Option<TokenLikelihoods>> {
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

/// The most likely tokens and the chosen one. Two tokens of one text keep the likelier.
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

/// A token as text; bytes that are not whole characters are spelt out, so that different tokens stay different.
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
