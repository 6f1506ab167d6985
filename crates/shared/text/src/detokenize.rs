//! Text from tokens, one token at a time.
//!
//! A token may hold a part of a character. [`Detokenizer`] holds such bytes back until the character is whole, so
//! every piece it gives out is text, and all pieces together equal [`Tokenizer::decode`] of all tokens. What can
//! no longer become a character turns into U+FFFD, exactly as `String::from_utf8_lossy` does it.

use std::sync::Arc;

use crate::{
    tokenizer::{SkipSpecial, Tokenizer},
    utf8_buffer::Utf8Buffer,
};

/// Whether tokens begin a text or go on with one that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextStart {
    /// The tokens are a text of their own. SentencePiece tokenizers put a space in front of a text before they
    /// encode it; that space is taken away again.
    Beginning,
    /// The tokens follow a prompt: a leading space separates the words.
    Continuation,
}

/// Turns the tokens of one sequence into text as they come.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    special: SkipSpecial,
    /// Tokens that are shown although they are special.
    shown: Vec<u32>,
    buffer: Utf8Buffer,
    /// The next byte of text may be the space a SentencePiece tokenizer put in front.
    strip_space: bool,
    out: String,
}

impl Detokenizer {
    /// A detokenizer before its first token.
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

    /// Shows the special tokens of these names by their names.
    #[must_use]
    pub fn showing(mut self, names: &[&str]) -> Self {
        self.shown = names.iter().filter_map(|name| self.tokenizer.token_id(name)).collect();
        self
    }

    /// Takes the next token and gives the text that is whole now, which may be none. An id the vocabulary does
    /// not have is no text.
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

    /// The end of the sequence: U+FFFD if it ends within a character, else nothing.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        self.buffer.finish(&mut self.out);
        &self.out
    }
}
