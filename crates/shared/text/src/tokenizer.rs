//! Tokenizers: text to token ids and back.
//!
//! A tokenizer is read from a GGUF file's metadata ([`Tokenizer::from_gguf`]) or from a model directory's
//! `tokenizer.json` ([`Tokenizer::from_directory`]). Both become the same pipeline of the `tokenizers` crate:
//! added tokens, normalizer, pre-tokenizer, byte pair encoding. Two families are understood, byte-level BPE (GPT-2,
//! Llama 3, Qwen, SmolLM) and SentencePiece BPE with byte fallback (Llama 2, Mistral 0.1); others are refused by name.
//!
//! Decoding is our own, from a table of every token's bytes: it never loses a byte, and the streaming
//! [`crate::detokenize::Detokenizer`] and [`Tokenizer::decode`] are the same function.
//!
//! # Layout
//! - `from_gguf`, `from_directory`: what the files say
//! - `expressions`: bounds on the expressions among it
//! - `pre_tokenizer`: how text is split into words, by the names GGUF files use
//! - `sentencepiece`: merges from pieces and scores
//! - `pipeline`: text to ids
//! - `names`, `escape_special_tokens`: special tokens' names in a text; those that people wrote, told from those that a template wrote
//! - `vocabulary`, `byte_level`: ids to bytes

mod byte_level;
mod error;
mod escape_special_tokens;
mod expressions;
pub(crate) mod from_directory;
mod from_gguf;
pub mod limits;
mod names;
mod options;
mod pipeline;
mod pre_tokenizer;
mod sentencepiece;
mod vocabulary;

use std::borrow::Cow;

pub use error::{EncodeError, TokenizerError};
pub use options::{AddSpecial, ParseSpecial, SkipSpecial};

use crate::{chat_template::TemplateTokens, utf8_buffer::Utf8Buffer};
use pipeline::Pipeline;
use vocabulary::Vocabulary;

/// Special tokens with a role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Roles {
    bos: Option<u32>,
    eos: Option<u32>,
    pad: Option<u32>,
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    pipeline: Pipeline,
    vocabulary: Vocabulary,
    names: names::Names,
    roles: Roles,
    stop_tokens: Vec<u32>,
    adds_leading_space: bool,
    chat_template: Option<String>,
}

impl Tokenizer {
    /// The token ids of `text`.
    ///
    /// # Errors
    /// If the text cannot be split (a regular expression of the tokenizer exceeds its steps), or, with
    /// [`ParseSpecial::No`], if this vocabulary turns plain text into a control token.
    pub fn encode(&self, text: &str, add: AddSpecial, parse: ParseSpecial) -> Result<Vec<u32>, EncodeError> {
        let encoding = self.pipeline.encode(text, parse)?;
        if parse == ParseSpecial::No
            && let Some(&id) = encoding.get_ids().iter().find(|&&id| self.vocabulary.is_control(id))
        {
            return Err(EncodeError::ControlToken { name: self.token_text(id).into_owned() });
        }
        self.pipeline.framed(encoding, add)
    }

    /// The text of `tokens`, a text of its own: the space a SentencePiece tokenizer puts in front is taken away.
    /// Bytes that are no UTF-8 become U+FFFD; ids the vocabulary does not have are no text.
    #[must_use]
    pub fn decode(&self, tokens: &[u32], special: SkipSpecial) -> String {
        let mut text = String::new();
        let mut buffer = Utf8Buffer::default();
        let skipped = |token: u32| special == SkipSpecial::Yes && self.is_special(token);
        let mut strip_space = self.adds_leading_space;
        for &token in tokens.iter().filter(|&&token| !skipped(token)) {
            let Some(bytes) = self.token_bytes(token).filter(|bytes| !bytes.is_empty()) else {
                continue;
            };
            let strip = std::mem::take(&mut strip_space);
            let bytes = if strip { bytes.strip_prefix(b" ").unwrap_or(bytes) } else { bytes };
            buffer.push(bytes, &mut text);
        }
        buffer.finish(&mut text);
        text
    }

    /// The bytes a token stands for: part of a character for some, the name for a special token. `None` if the
    /// vocabulary has no such id.
    #[must_use]
    pub fn token_bytes(&self, token: u32) -> Option<&[u8]> {
        self.vocabulary.bytes(token)
    }

    /// [`Tokenizer::token_bytes`] as text, with U+FFFD for what is not UTF-8; empty for an unknown id.
    #[must_use]
    pub fn token_text(&self, token: u32) -> Cow<'_, str> {
        String::from_utf8_lossy(self.token_bytes(token).unwrap_or_default())
    }

    /// The token that the vocabulary spells `spelling` (`<|im_end|>`, `Ġthe`, `▁the`).
    #[must_use]
    pub fn token_id(&self, spelling: &str) -> Option<u32> {
        self.pipeline.token_id(spelling)
    }

    /// True for tokens that are no text: control tokens and the unknown token.
    #[must_use]
    pub fn is_special(&self, token: u32) -> bool {
        self.vocabulary.is_special(token)
    }

    /// One more than the largest token id. The model's logits may be more, by padding.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Beginning of a sequence.
    #[must_use]
    pub fn bos_token(&self) -> Option<u32> {
        self.roles.bos
    }

    /// End of a sequence.
    #[must_use]
    pub fn eos_token(&self) -> Option<u32> {
        self.roles.eos
    }

    /// Padding.
    #[must_use]
    pub fn pad_token(&self) -> Option<u32> {
        self.roles.pad
    }

    /// The tokens that end an answer, sorted: end of sequence, of a turn, of a message that calls a tool; those of
    /// `generation_config.json`, and in GGUF files control tokens with the names that llama.cpp knows as such.
    #[must_use]
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// True if encoding puts a space in front of a text, as SentencePiece does.
    #[must_use]
    pub fn adds_leading_space(&self) -> bool {
        self.adds_leading_space
    }

    /// The source of the model's chat template.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The special tokens as chat templates use them.
    #[must_use]
    pub fn template_tokens(&self) -> TemplateTokens {
        let text = |token: Option<u32>| token.map(|token| self.token_text(token).into_owned());
        TemplateTokens { bos: text(self.roles.bos), eos: text(self.roles.eos), pad: text(self.roles.pad) }
    }
}
