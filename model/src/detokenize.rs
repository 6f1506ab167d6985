//! Text from tokens, one token at a time.
//!
//! A token may hold a part of a character. [`Detokenizer`] holds such bytes back until the character is whole, so
//! every piece it gives out is text, and all pieces together equal [`Tokenizer::decode`] of all tokens. What can
//! no longer become a character turns into U+FFFD, exactly as `String::from_utf8_lossy` does it.

use std::sync::Arc;

use crate::tokenizer::{SkipSpecial, Tokenizer};

/// Whether tokens begin a text or go on with one that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextStart {
    /// The tokens are a text of their own. SentencePiece tokenizers put a space in front of a text before they
    /// encode it; that space is taken away again.
    Beginning,
    /// The tokens follow a prompt: a leading space separates the words.
    Continuation,
}

/// Bytes that become text as soon as they are whole characters.
#[derive(Debug, Default)]
pub(crate) struct Utf8Buffer {
    /// The beginning of a character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl Utf8Buffer {
    /// Takes `bytes` and appends all whole characters to `out`.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut done = 0;
        loop {
            let rest = &self.pending[done..];
            let Err(error) = std::str::from_utf8(rest).map(|text| out.push_str(text)) else {
                done = self.pending.len();
                break;
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            out.push_str(&String::from_utf8_lossy(valid));
            done += valid.len();
            // Without a length the bytes are the beginning of a character that may go on.
            let Some(invalid) = error.error_len() else { break };
            debug_assert!(invalid <= after.len());
            out.push(char::REPLACEMENT_CHARACTER);
            done += invalid;
        }
        self.pending.drain(..done);
    }

    /// The end: what is pending will not become whole.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Turns the tokens of one sequence into text as they come.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    special: SkipSpecial,
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
        Self { tokenizer, special, buffer: Utf8Buffer::default(), strip_space, out: String::new() }
    }

    /// Takes the next token and gives the text that is whole now, which may be none. An id the vocabulary does
    /// not have is no text.
    pub fn push(&mut self, token: u32) -> &str {
        self.out.clear();
        let skipped = self.special == SkipSpecial::Yes && self.tokenizer.is_special(token);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_in_pieces_become_the_text_of_the_whole(
            pieces in proptest::collection::vec(
                proptest::collection::vec(
                    prop_oneof![any::<u8>(), Just(0xf0), Just(0x9f), Just(0x98), Just(0x80), Just(b'a')],
                    0..5,
                ),
                0..12,
            ),
        ) {
            let mut buffer = Utf8Buffer::default();
            let mut out = String::new();
            for piece in &pieces {
                buffer.push(piece, &mut out);
                prop_assert!(buffer.pending.len() <= 3);
            }
            buffer.finish(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&pieces.concat()).into_owned());
        }
    }
}
