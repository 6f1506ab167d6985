//! Bounds the length of numbers, because the library allows any number of digits in a JSON number.
//!
//! A matcher counts the digits at the end of the text. From [`MAX_DIGITS`] on, tokens that continue the
//! number are removed from the allowed tokens, if the number may end there. Digits within quotes are not
//! affected, since other tokens than `,` or `}` may follow them.

use llguidance::toktrie::TokTrie;

/// Maximum number of digits of a number, with its fraction and exponent. The last token may add a few more.
pub(super) const MAX_DIGITS: u16 = 32;

/// Whether a number may continue with `byte`.
fn goes_on(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-')
}

/// Whether `byte` can follow a number in JSON, or follow JSON in tool calls. Special tokens begin with a
/// marker byte.
fn stands_behind(byte: u8) -> bool {
    matches!(
        byte,
        b',' | b'}'
            | b']'
            | b' '
            | b'\n'
            | b'\r'
            | b'\t'
            | b')'
            | b';'
            | b'<'
            | TokTrie::SPECIAL_TOKEN_MARKER
    )
}

/// Bit sets of a vocabulary's tokens by their first bytes.
#[derive(Debug)]
pub(super) struct TokensByFirstByte {
    goes_on: Vec<u32>,
    stands_behind: Vec<u32>,
    special: Vec<u32>,
}

impl TokensByFirstByte {
    pub(super) fn of(trie: &TokTrie) -> Self {
        let tokens = u32::try_from(trie.vocab_size()).unwrap_or(u32::MAX);
        let begin_with = |is_meant: fn(u8) -> bool| {
            let mut words = vec![0_u32; trie.vocab_size().div_ceil(32)];
            for token in
                (0..tokens).filter(|&token| trie.token(token).first().is_some_and(|&byte| is_meant(byte)))
            {
                words[token as usize / 32] |= 1 << (token % 32);
            }
            words
        };
        Self {
            goes_on: begin_with(goes_on),
            stands_behind: begin_with(stands_behind),
            special: begin_with(|byte| byte == TokTrie::SPECIAL_TOKEN_MARKER),
        }
    }

    /// Removes special tokens from `allowed`, except `kept`.
    pub(super) fn leave_text(&self, allowed: &mut [u32], kept: &[u32]) {
        let is_allowed = |allowed: &[u32], token: u32| {
            allowed.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
        };
        let kept: Vec<u32> = kept.iter().copied().filter(|&token| is_allowed(allowed, token)).collect();
        allowed.iter_mut().zip(&self.special).for_each(|(word, special)| *word &= !special);
        kept.into_iter().for_each(|token| allowed[token as usize / 32] |= 1 << (token % 32));
    }

    pub(super) fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Removes tokens that continue a number from `allowed`, if other tokens remain and each of them can
    /// follow a number.
    pub(super) fn end_number(&self, allowed: &mut [u32]) {
        let left = |(word, goes_on): (&u32, &u32)| word & !goes_on;
        let mut others = allowed.iter().zip(&self.goes_on).map(left).zip(&self.stands_behind);
        let may_end = others.clone().any(|(left, _)| left != 0);
        if may_end && others.all(|(left, behind)| left & !behind == 0) {
            allowed.iter_mut().zip(&self.goes_on).for_each(|(word, goes_on)| *word &= !goes_on);
        }
    }
}

/// Number of digits at the end of the text, after each token.
#[derive(Debug, Clone, Default)]
pub(super) struct NumberLength {
    behind: Vec<u16>,
}

impl NumberLength {
    /// Whether a number at the end of the text has the maximum number of digits.
    pub(super) fn are_enough(&self) -> bool {
        self.now() >= MAX_DIGITS
    }

    fn now(&self) -> u16 {
        self.behind.last().copied().unwrap_or(0)
    }

    /// Counts the digits of a token with these `bytes`.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        let count = |digits: u16, byte: &u8| match byte {
            b'0'..=b'9' => digits.saturating_add(1),
            byte if goes_on(*byte) => digits,
            _ => 0,
        };
        self.behind.push(bytes.iter().fold(self.now(), count));
    }

    /// Rolls back the last `tokens` tokens.
    pub(super) fn take_back(&mut self, tokens: usize) {
        self.behind.truncate(self.behind.len().saturating_sub(tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_of_one_number_are_counted_over_tokens_and_taken_back() {
        let mut digits = NumberLength::default();
        for (token, count) in [("{\"a1\": -", 0), ("12", 2), (".5e+", 3), ("7", 4), (", ", 0), ("8", 1)] {
            digits.add(token.as_bytes());
            assert_eq!(digits.now(), count, "{token}");
        }
        digits.take_back(2);
        assert_eq!(digits.now(), 4);
        digits.add("1".repeat(28).as_bytes());
        assert!(digits.are_enough());
    }
}
