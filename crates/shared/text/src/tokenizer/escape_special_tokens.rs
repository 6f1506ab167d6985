//! Quotes special tokens' names in user text, so that only names from a chat template become tokens.
//!
//! After rendering, both would look alike. So user text is *quoted* before rendering: [`Tokenizer::quote`]
//! inserts a mark, a character that occurs nowhere else, into every name. A template may trim, join and
//! repeat quoted text, and the mark stays in it. [`Tokenizer::encode_quoted`] then encodes names without a
//! mark as tokens, and the text between them, its marks removed, as text.

use super::{
    Tokenizer,
    error::EncodeError,
    options::{AddSpecial, ParseSpecial},
};

/// Characters of a plane for private use, which no tokenizer has in words and users rarely send.
const MARKS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{F00FF}';

impl Tokenizer {
    /// True if `text` contains the name of a control token.
    #[must_use]
    pub fn names_control_token(&self, text: &str) -> bool {
        self.names.first_in(text).is_some()
    }

    /// Returns a mark that none of `texts` contains; `None` if the texts use all marks.
    #[must_use]
    pub fn mark_absent_from(&self, texts: &[&str]) -> Option<char> {
        MARKS.into_iter().find(|mark| texts.iter().all(|text| !text.contains(*mark)))
    }

    /// Inserts `mark` after the first character of every control token's name in `text`.
    #[must_use]
    pub fn quote(&self, text: &str, mark: char) -> String {
        let mut quoted = String::with_capacity(text.len() + 16);
        for (at, first) in text.char_indices() {
            quoted.push(first);
            if self.names.at_start_of(&text[at..]).is_some() {
                quoted.push(mark);
            }
        }
        quoted
    }

    /// Encodes rendered text: names of control tokens become those tokens unless they were quoted.
    ///
    /// # Errors
    /// The errors of [`encode`](Self::encode) for the text between the names.
    pub fn encode_quoted(&self, text: &str, mark: char) -> Result<Vec<u32>, EncodeError> {
        let (mut tokens, mut rest) = (Vec::new(), text);
        while let Some((at, name, token)) = self.names.first_in(rest) {
            self.append_text(&rest[..at], mark, &mut tokens)?;
            tokens.push(token);
            rest = &rest[at + name.len()..];
        }
        self.append_text(rest, mark, &mut tokens)?;
        Ok(tokens)
    }

    fn append_text(&self, text: &str, mark: char, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        if !text.is_empty() {
            tokens.extend(self.encode(&text.replace(mark, ""), AddSpecial::No, ParseSpecial::No)?);
        }
        Ok(())
    }
}
