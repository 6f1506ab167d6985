//! Activated LoRA (aLoRA) applies from its invocation on, so earlier KV blocks are those of the base.

use std::sync::Arc;

use super::limits::MAX_INVOCATION;

/// The token sequence that invokes an activated adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation(Arc<[u32]>);

impl Invocation {
    /// Checks `tokens` against a vocabulary of `vocab_size` tokens.
    ///
    /// # Errors
    /// The list is missing, empty, too long, or has ids outside the vocabulary.
    pub fn new(tokens: Option<Vec<i64>>, vocab_size: usize) -> Result<Self, String> {
        let is_token = |token: &i64| usize::try_from(*token).is_ok_and(|token| token < vocab_size);
        match tokens {
            Some(tokens) if !(1..=MAX_INVOCATION).contains(&tokens.len()) => {
                Err(format!("has {} tokens, but must have 1 to {MAX_INVOCATION}", tokens.len()))
            }
            Some(tokens) if tokens.iter().all(is_token) => {
                Ok(Self(tokens.into_iter().filter_map(|token| u32::try_from(token).ok()).collect()))
            }
            _ => Err(format!("must be token ids below {vocab_size}")),
        }
    }

    /// Returns the invocation tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.0
    }

    /// Returns the index in `prompt` where the last invocation begins; the adapter applies from there.
    /// Without an invocation the result is `usize::MAX`: the adapter applies nowhere, not even after
    /// generated tokens that equal the invocation.
    #[must_use]
    pub fn begin(&self, prompt: &[u32]) -> usize {
        prompt.windows(self.0.len()).rposition(|window| window == &*self.0).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_invocation_counts() {
        let invocation = Invocation::new(Some(vec![7, 8]), 10).unwrap();
        for (prompt, begin) in [
            (&[7u32, 8, 1, 7, 8, 2][..], 3),
            (&[7, 8], 0),
            (&[7, 7, 8], 1),
            (&[8, 7], usize::MAX),
            (&[7], usize::MAX),
            (&[], usize::MAX),
        ] {
            assert_eq!(invocation.begin(prompt), begin, "{prompt:?}");
        }
    }

    #[test]
    fn tokens_are_some_and_of_the_vocabulary() {
        for bad in [None, Some(vec![]), Some(vec![10]), Some(vec![-1]), Some(vec![1; MAX_INVOCATION + 1])] {
            Invocation::new(bad, 10).unwrap_err();
        }
    }
}
