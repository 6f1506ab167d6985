//! Text of which some is quoted: a special token's name that a person wrote is text, one that a chat template wrote is
//! the token.
//!
//! The two are told apart after rendering, where they look alike. So what people wrote is *quoted* before it goes into
//! the template: a mark, a character that is nowhere else, is put into every name in it ([`Tokenizer::quote`]). A
//! template may trim, join and repeat quoted text, and the mark goes along. [`Tokenizer::encode_quoted`] then takes
//! names without a mark as tokens, and everything between them, its marks removed, as text.

use super::{AddSpecial, EncodeError, ParseSpecial, Tokenizer};

/// Characters of a plane for private use: no tokenizer has words with them, and few people send them.
const MARKS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{F00FF}';

/// The names of the control tokens, the longer before the shorter.
#[derive(Debug)]
pub(super) struct Names {
    names: Vec<(String, u32)>,
    /// The bytes that names begin with: nearly always one, so that most of a text is passed over quickly.
    firsts: Vec<u8>,
}

impl Names {
    /// The names among `tokens`.
    pub(super) fn new(tokens: impl Iterator<Item = (String, u32)>) -> Self {
        let mut names: Vec<_> = tokens.filter(|(name, _)| name.chars().nth(1).is_some()).collect();
        names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        let mut firsts: Vec<u8> = names.iter().filter_map(|(name, _)| name.bytes().next()).collect();
        firsts.sort_unstable();
        firsts.dedup();
        Self { names, firsts }
    }

    /// The name that `text` begins with, and its token.
    fn at_start_of(&self, text: &str) -> Option<(&str, u32)> {
        let found = self.names.iter().find(|(name, _)| text.starts_with(name.as_str()));
        found.map(|(name, token)| (name.as_str(), *token))
    }

    /// The first name in `text` with its place and token.
    fn first_in(&self, text: &str) -> Option<(usize, &str, u32)> {
        let may_begin = |at: &usize| self.firsts.contains(&text.as_bytes()[*at]);
        (0..text.len()).filter(may_begin).find_map(|at| {
            // A byte that a name begins with begins a character.
            let (name, token) = self.at_start_of(text.get(at..)?)?;
            Some((at, name, token))
        })
    }
}

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
