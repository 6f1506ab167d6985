//! Tokenizers: text to token ids and back.
//!
//! A tokenizer is read from a GGUF file's metadata ([`Tokenizer::from_gguf`]) or from a model directory's
//! `tokenizer.json` ([`Tokenizer::from_directory`]). Both become the same pipeline of the `tokenizers`
//! crate: added tokens, normalizer, pre-tokenizer, byte pair encoding. Two families are supported,
//! byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece BPE with byte fallback (Llama 2, Mistral
//! 0.1); others are refused by name.
//!
//! Decoding uses our own table of every token's bytes and never loses a byte. The streaming
//! [`crate::detokenize::Detokenizer`] and [`Tokenizer::decode`] are the same function.
//!
//! # Layout
//! - `from_gguf`, `from_directory`: readers of the file formats
//! - `expressions`: bounds on regular expressions in a file
//! - `pre_tokenizer`: splitting into words, by the names in GGUF files
//! - `sentencepiece`: merges from pieces and scores
//! - `pipeline`: text to ids
//! - `names`, `escape_special_tokens`: names of special tokens in a text, and their quoting in user text
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

/// Ids of special tokens with a role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Roles {
    bos: Option<u32>,
    eos: Option<u32>,
    pad: Option<u32>,
}

/// Tokenizer of one model, with its special tokens.
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
    /// Encodes `text` as token ids.
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

    /// Decodes `tokens` as a separate text: the leading space that SentencePiece tokenizers add is removed.
    /// Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary yield no text.
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

    /// Returns the bytes of a token, which may be part of a character; for a special token its name. `None`
    /// if the vocabulary has no such id.
    #[must_use]
    pub fn token_bytes(&self, token: u32) -> Option<&[u8]> {
        self.vocabulary.bytes(token)
    }

    /// Returns [`Tokenizer::token_bytes`] as text, with U+FFFD for invalid UTF-8; empty for an unknown id.
    #[must_use]
    pub fn token_text(&self, token: u32) -> Cow<'_, str> {
        String::from_utf8_lossy(self.token_bytes(token).unwrap_or_default())
    }

    /// Returns the token that the vocabulary spells `spelling` (`< im_end >`, `Ġthe`, `▁the`).
    #[must_use]
    pub fn token_id(&self, spelling: &str) -> Option<u32> {
        self.pipeline.token_id(spelling)
    }

    /// True for tokens that yield no text: control tokens and the unknown token.
    #[must_use]
    pub fn is_special(&self, token: u32) -> bool {
        self.vocabulary.is_special(token)
    }

    /// Returns one more than the largest token id. The model may have more logits because of padding.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Returns the beginning-of-sequence token, if any.
    #[must_use]
    pub fn bos_token(&self) -> Option<u32> {
        self.roles.bos
    }

    /// Returns the end-of-sequence token, if any.
    #[must_use]
    pub fn eos_token(&self) -> Option<u32> {
        self.roles.eos
    }

    /// Returns the padding token, if any.
    #[must_use]
    pub fn pad_token(&self) -> Option<u32> {
        self.roles.pad
    }

    /// Returns the sorted tokens that end an answer: end of sequence, of a turn, or of a tool-calling
    /// message. The ids are those of `generation_config.json`, and in GGUF files also control tokens whose
    /// names llama.cpp knows.
    #[must_use]
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// True if encoding adds a space before a text, as SentencePiece does.
    #[must_use]
    pub fn adds_leading_space(&self) -> bool {
        self.adds_leading_space
    }

    /// Returns the source of the model's chat template.
    #[must_use]
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Returns the special tokens that chat templates use as variables.
    #[must_use]
    pub fn template_tokens(&self) -> TemplateTokens {
        let text = |token: Option<u32>| token.map(|token| self.token_text(token).into_owned());
        TemplateTokens { bos: text(self.roles.bos), eos: text(self.roles.eos), pad: text(self.roles.pad) }
    }
}
