//! Converts tokens to text, one token at a time.
//!
//! A token may hold part of a character. [`Detokenizer`] keeps such bytes until the character is complete,
//! so every returned piece is text, and all pieces together equal [`Tokenizer::decode`] of all tokens.
//! Bytes that cannot become a character turn into U+FFFD, exactly as in `String::from_utf8_lossy`.

use std::sync::Arc;

use crate::{
    tokenizer::{SkipSpecial, Tokenizer},
    utf8_buffer::Utf8Buffer,
};

/// Whether tokens begin a text or continue an existing one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextStart {
    /// The tokens are a separate text. SentencePiece tokenizers add a space before a text when they encode
    /// it; decoding removes that space.
    Beginning,
    /// The tokens follow a prompt, so a leading space separates the words.
    Continuation,
}

/// Converts the tokens of one sequence to text as they arrive.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    special: SkipSpecial,
    /// Special tokens that are shown nevertheless.
    shown: Vec<u32>,
    buffer: Utf8Buffer,
    /// True if the next byte of text may be the space that a SentencePiece tokenizer added.
    strip_space: bool,
    out: String,
}

impl Detokenizer {
    /// Creates a detokenizer before its first token.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, special: SkipSpecial, start: TextStart) -> Self {
        let strip_space = start == TextStart::Beginning && tokenizer.adds_leading_space();
        Self {
            tokenizer,
            special,
            shown: Vec::new(),
            buffer: Utf8Buffer::default(),
            strip_space,
            out: String::new(),
        }
    }

    /// Shows the special tokens of these names by name.
    #[must_use]
    pub fn showing(mut self, names: &[&str]) -> Self {
        self.shown = names.iter().filter_map(|name| self.tokenizer.token_id(name)).collect();
        self
    }

    /// Takes the next token and returns the text that is now complete, possibly empty. An id outside the
    /// vocabulary yields no text.
    pub fn push(&mut self, token: u32) -> &str {
        self.out.clear();
        let skipped = self.special == SkipSpecial::Yes
            && self.tokenizer.is_special(token)
            && !self.shown.contains(&token);
        if let Some(mut bytes) =
            self.tokenizer.token_bytes(token).filter(|bytes| !skipped && !bytes.is_empty())
        {
            if std::mem::take(&mut self.strip_space) {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
            self.buffer.push(bytes, &mut self.out);
        }
        &self.out
    }

    /// Ends the sequence: returns U+FFFD if it ends within a character, else nothing.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        self.buffer.finish(&mut self.out);
        &self.out
    }
}
