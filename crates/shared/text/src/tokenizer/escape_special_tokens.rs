//! Text of which some is quoted: a special token's name that a person wrote is text, one that a chat template wrote is
//! the token.
//!
//! The two are told apart after rendering, where they look alike. So what people wrote is *quoted* before it goes into
//! the template: a mark, a character that is nowhere else, is put into every name in it ([`Tokenizer::quote`]). A
//! template may trim, join and repeat quoted text, and the mark goes along. [`Tokenizer::encode_quoted`] then takes
//! names without a mark as tokens, and everything between them, its marks removed, as text.

use super::{
    Tokenizer,
    error::EncodeError,
    options::{AddSpecial, ParseSpecial},
};

/// Characters of a plane for private use: no tokenizer has words with them, and few people send them.
const MARKS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{F00FF}';

impl Tokenizer {
    /// True if the name of a control token is in `text`.
    #[must_use]
    pub fn names_control_token(&self, text: &str) -> bool {
        self.names.first_in(text).is_some()
    }

    /// A mark that is in none of `texts`; `None` if they have all there are.
    #[must_use]
    pub fn mark_absent_from(&self, texts: &[&str]) -> Option<char> {
        MARKS.into_iter().find(|mark| texts.iter().all(|text| !text.contains(*mark)))
    }

    /// `text` with `mark` in the name of every control token, behind its first character.
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

    /// The token ids of rendered text: names of control tokens are those tokens, except where they were quoted.
    ///
    /// # Errors
    /// As [`encode`](Self::encode) of the text between the names.
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
