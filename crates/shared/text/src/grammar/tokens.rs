//! Classifies the tokens of a vocabulary for a grammar: text, end of the answer, or not allowed.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use serde::{Deserialize, Serialize};

use crate::tokenizer::Tokenizer;

/// Content of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenBytes<'a> {
    /// Bytes of the token's text.
    Text(&'a [u8]),
    /// Name of a token without text; empty if there is no such token.
    Special(&'a [u8]),
}

/// All tokens of a vocabulary, by id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokens {
    words: Vec<Vec<u8>>,
    end_tokens: Vec<u32>,
}

impl Tokens {
    /// Collects the tokens of `tokenizer`.
    #[must_use]
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let ids = (0..tokenizer.vocab_size()).filter_map(|id| u32::try_from(id).ok());
        let bytes = ids.map(|id| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            if tokenizer.is_special(id) { TokenBytes::Special(bytes) } else { TokenBytes::Text(bytes) }
        });
        Self::new(bytes, tokenizer.stop_tokens())
    }

    /// Collects `tokens` in the order of their ids; an answer may end with one of `end_tokens`.
    pub fn new<'a>(tokens: impl Iterator<Item = TokenBytes<'a>>, end_tokens: &[u32]) -> Self {
        let word = |token| match token {
            TokenBytes::Text(bytes) => bytes.to_vec(),
            TokenBytes::Special([]) => Vec::new(),
            TokenBytes::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat(),
        };
        let mut words: Vec<Vec<u8>> = tokens.map(word).collect();
        let end_tokens: Vec<u32> =
            end_tokens.iter().copied().filter(|&token| (token as usize) < words.len()).collect();
        for &token in &end_tokens {
            // A token that ends the answer is not text, regardless of its name.
            let word = &mut words[token as usize];
            if word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
        }
        Self { words, end_tokens }
    }

    pub(super) fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// Returns the library's form of the vocabulary; `None` if no token ends an answer. Any tokenization of
    /// an allowed text is allowed, because the environment does not say how text becomes tokens.
    pub(super) fn environment(&self) -> Option<TokEnv> {
        let vocab_size = u32::try_from(self.words.len()).ok()?;
        let info = TokRxInfo::new(vocab_size, *self.end_tokens.first()?);
        Some(Arc::new(ApproximateTokEnv::new(
            TokTrie::from(&info, &self.words).with_eos_tokens(&self.end_tokens),
        )))
    }
}
