//! State of one answer in a grammar.

use std::sync::Arc;

use llguidance::toktrie::SimpleVob;

use super::digits::{NumberLength, TokensByFirstByte};

/// Why a matcher cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// The grammar does not allow the token here.
    #[error("token {token} is not allowed by the grammar after the tokens before it")]
    NotAllowed {
        /// Id of the refused token.
        token: u32,
    },
    /// Computing the allowed tokens exceeds the bounds, or the vocabulary cannot spell any allowed
    /// continuation.
    #[error("cannot compute the allowed next tokens ({0}); simplify the schema or grammar")]
    Stuck(String),
}

/// Set of tokens of a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
}

impl TokenSet {
    /// Returns the bits: 32 tokens a word, the lowest bit first. Tokens beyond the last word are not in the
    /// set.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Whether the set contains `token`.
    #[must_use]
    pub fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Whether the set contains tokens other than `tokens`.
    #[must_use]
    pub fn has_others_than(&self, tokens: &[u32]) -> bool {
        let count: u32 = self.words.iter().map(|word| word.count_ones()).sum();
        let mut known = tokens.to_vec();
        known.sort_unstable();
        known.dedup();
        count as usize > known.iter().filter(|&&token| self.contains(token)).count()
    }

    fn of(set: &SimpleVob, tokens: usize) -> Self {
        let mut words = set.as_slice().to_vec();
        words.truncate(tokens.div_ceil(32));
        Self { words }
    }
}

/// The accepted tokens of an answer, and the tokens that may follow.
#[derive(Clone)]
pub struct Matcher {
    inner: llguidance::Matcher,
    end_tokens: Arc<[u32]>,
    bytes: usize,
    beginnings: Arc<TokensByFirstByte>,
    /// Counts digits of the answer's numbers if the grammar may contain JSON.
    numbers: Option<NumberLength>,
    specials: SpecialTokenMode,
}

/// Special tokens in an answer. The library treats them as text where a grammar says `~`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpecialTokenMode {
    /// The grammar names some special tokens.
    Named,
    /// The answer may contain only special tokens that end it.
    None,
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("stopped", &self.inner.is_stopped()).finish_non_exhaustive()
    }
}

impl Matcher {
    /// `numbers` is present if numbers have to end.
    pub(super) fn new(
        inner: llguidance::Matcher,
        end_tokens: Arc<[u32]>,
        bytes: usize,
        beginnings: Arc<TokensByFirstByte>,
        (numbers, specials): (Option<NumberLength>, SpecialTokenMode),
    ) -> Self {
        Self { inner, end_tokens, bytes, beginnings, numbers, specials }
    }

    /// Estimates the memory in bytes of the compiled grammar before any step: the lexer's tables, and a
    /// multiple of the source's length.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies the matcher with separate memory, so that answers do not share what their steps add. A clone
    /// shares that memory.
    #[must_use]
    pub fn deep_clone(&self) -> Self {
        Self { inner: self.inner.deep_clone(), ..self.clone() }
    }

    /// Returns the tokens that may come next, including end tokens where the answer may end. The set is
    /// never empty.
    ///
    /// # Errors
    /// If the computation exceeds its bounds.
    pub fn allowed(&mut self) -> Result<TokenSet, MatchError> {
        let set = self.inner.compute_mask_or_eos();
        let set = set.map_err(|error| MatchError::Stuck(super::words_of(&error)))?;
        let tokens = self.inner.tok_env().map_or(0, |environment| environment.tok_trie().vocab_size());
        let mut set = TokenSet::of(&set, tokens);
        self.leave_out_specials(&mut set);
        if self.are_digits_enough() {
            self.beginnings.end_number(&mut set.words);
        }
        Ok(set)
    }

    /// Removes from `set` end tokens where the answer may not end, and special tokens that the grammar does
    /// not name.
    fn leave_out_specials(&mut self, set: &mut TokenSet) {
        let may_end = self.inner.is_stopped() || self.may_end();
        let kept = if may_end { &self.end_tokens[..] } else { &[] };
        match self.specials {
            SpecialTokenMode::None => self.beginnings.leave_text(&mut set.words, kept),
            SpecialTokenMode::Named if !may_end => {
                for token in self.end_tokens.iter().filter(|&&token| set.contains(token)).collect::<Vec<_>>()
                {
                    set.words[*token as usize / 32] &= !(1 << (token % 32));
                }
            }
            SpecialTokenMode::Named => {}
        }
    }

    fn are_digits_enough(&self) -> bool {
        self.numbers.as_ref().is_some_and(NumberLength::are_enough)
    }

    /// Advances the matcher by `token`. A token that ends the answer changes nothing.
    ///
    /// # Errors
    /// If the token is not allowed here, or the bounds are exceeded.
    pub fn accept(&mut self, token: u32) -> Result<(), MatchError> {
        if self.ends_with(token) {
            return Ok(());
        }
        let is_in_doubt = self.are_digits_enough() || self.beginnings.is_special(token);
        if is_in_doubt && !self.allowed()?.contains(token) {
            return Err(MatchError::NotAllowed { token });
        }
        let taken = self.inner.try_consume_tokens(&[token]);
        if taken.map_err(|error| MatchError::Stuck(super::words_of(&error)))? == 0 {
            return Err(MatchError::NotAllowed { token });
        }
        if let (Some(numbers), Ok(environment)) = (&mut self.numbers, self.inner.tok_env()) {
            numbers.add(environment.tok_trie().token(token));
        }
        Ok(())
    }

    /// Rolls back the last `tokens` tokens, none of which ended an answer.
    ///
    /// # Errors
    /// If fewer tokens were accepted.
    pub fn take_back(&mut self, tokens: usize) -> Result<(), MatchError> {
        self.inner.rollback(tokens).map_err(|error| MatchError::Stuck(super::words_of(&error)))?;
        if let Some(numbers) = &mut self.numbers {
            numbers.take_back(tokens);
        }
        Ok(())
    }

    /// Whether `token` ends an answer.
    #[must_use]
    pub fn ends_with(&self, token: u32) -> bool {
        self.end_tokens.contains(&token)
    }

    /// Whether the answer may end here.
    pub fn may_end(&mut self) -> bool {
        self.inner.is_accepting().unwrap_or(false)
    }
}
