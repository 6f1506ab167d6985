//! Builds a tokenizer from a GGUF file's metadata (llama.cpp's `llama_vocab::impl::load` defines the keys).

use model_files::{generation_defaults::GenerationDefaults, gguf::GgufFile};
use tokenizers::{
    AddedToken, NormalizerWrapper,
    models::bpe::{Merges, Vocab},
    normalizers::{Prepend, Replace, Sequence},
};

use super::{
    Roles, Tokenizer, TokenizerError, limits,
    pipeline::{Frame, Parts, Pipeline},
    pre_tokenizer::{self, PreTokenizer},
    sentencepiece::{self, Piece, SPACE},
    vocabulary::{Kind, Token, TokenEncoding, Vocabulary, byte_piece, check_length},
};

/// Values of the key `tokenizer.ggml.token_type`.
mod token_type {
    pub(super) const NORMAL: i64 = 1;
    pub(super) const UNKNOWN: i64 = 2;
    pub(super) const CONTROL: i64 = 3;
    pub(super) const USER_DEFINED: i64 = 4;
    pub(super) const BYTE: i64 = 6;
}

/// Names of control tokens that end an answer, for files that do not list end ids (llama.cpp's list).
const END_NAMES: [&str; 16] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
];

struct Tokens<'a> {
    file: &'a GgufFile,
    texts: Vec<&'a str>,
    types: Vec<i64>,
    roles: Roles,
    unknown: Option<u32>,
    /// Ids of the tokens that end an answer.
    ends: Vec<u32>,
}

impl Tokenizer {
    /// Reads the tokenizer in a GGUF file's metadata.
    ///
    /// # Errors
    /// If there is no tokenizer, its kind or pre-tokenizer is not supported, or its parts are inconsistent.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, TokenizerError> {
        let model = file.str("tokenizer.ggml.model")?.ok_or_else(|| missing(file, "tokenizer.ggml.model"))?;
        let tokens = Tokens::read(file)?;
        let (parts, encoding, adds_leading_space) = match model {
            "gpt2" => (byte_level(&tokens)?, TokenEncoding::ByteLevel, false),
            "llama" => {
                let prefix = file.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
                (sentencepiece(&tokens, prefix)?, TokenEncoding::SentencePiece, prefix)
            }
            other => {
                return Err(TokenizerError::Unsupported {
                    path: file.path().to_path_buf(),
                    what: "tokenizer model",
                    name: other.to_owned(),
                    supported: "gpt2, llama",
                });
            }
        };
        let malformed = |detail| TokenizerError::Malformed { path: file.path().to_path_buf(), detail };
        let vocabulary = Vocabulary::new(tokens.entries(), encoding).map_err(malformed)?;
        Ok(Self {
            names: vocabulary.control_names(),
            vocabulary,
            pipeline: Pipeline::new(parts).map_err(malformed)?,
            roles: tokens.roles,
            stop_tokens: tokens.stop_tokens(),
            adds_leading_space,
            chat_template: file.str("tokenizer.chat_template")?.map(str::to_owned),
        })
    }
}

fn missing(file: &GgufFile, what: &'static str) -> TokenizerError {
    TokenizerError::Missing { path: file.path().to_path_buf(), what }
}

impl<'a> Tokens<'a> {
    fn read(file: &'a GgufFile) -> Result<Self, TokenizerError> {
        let malformed = |detail| TokenizerError::Malformed { path: file.path().to_path_buf(), detail };
        let key = "tokenizer.ggml.tokens";
        let texts = file.strings(key)?.ok_or_else(|| missing(file, key))?;
        if texts.is_empty() || texts.len() > limits::MAX_TOKENS {
            return Err(malformed(format!("`{key}` has {} tokens", texts.len())));
        }
        for text in &texts {
            check_length(text).map_err(malformed)?;
        }
        let types = match file.i64s("tokenizer.ggml.token_type")? {
            Some(types) if types.len() == texts.len() => types,
            Some(types) => {
                return Err(malformed(format!("{} tokens have {} token types", texts.len(), types.len())));
            }
            None => vec![token_type::NORMAL; texts.len()],
        };
        let role = |name: &str| -> Result<Option<u32>, TokenizerError> {
            let id = file.u32(&format!("tokenizer.ggml.{name}_token_id"))?;
            match id {
                Some(id) if id as usize >= texts.len() => {
                    Err(malformed(format!("`tokenizer.ggml.{name}_token_id` is {id}, which is not a token")))
                }
                id => Ok(id),
            }
        };
        let roles = Roles { bos: role("bos")?, eos: role("eos")?, pad: role("padding")? };
        let unknown = role("unknown")?;
        // Ids beyond the vocabulary cannot be generated, so they end nothing.
        let mut ends = GenerationDefaults::from_gguf(file)?.eos_token_ids;
        ends.retain(|&id| (id as usize) < texts.len());
        Ok(Self { file, texts, types, roles, unknown, ends })
    }

    fn iter(&self) -> impl Iterator<Item = (u32, &'a str, i64)> + '_ {
        (0u32..).zip(&self.texts).zip(&self.types).map(|((id, text), &kind)| (id, *text, kind))
    }

    /// Returns the token's kind; a token that ends answers is a control token regardless of its type.
    fn kind(&self, id: u32, kind: i64) -> Kind {
        match kind {
            token_type::CONTROL => Kind::Control,
            token_type::UNKNOWN => Kind::Unknown,
            _ if self.ends.contains(&id) || self.roles.bos == Some(id) => Kind::Control,
            _ => Kind::Text,
        }
    }

    fn entries(&self) -> impl Iterator<Item = Token<'a>> + '_ {
        self.iter().map(|(id, spelling, kind)| Token {
            id,
            spelling,
            kind: self.kind(id, kind),
            literal: self.kind(id, kind) != Kind::Text,
        })
    }

    /// Returns the tokens that are recognized in text as a whole.
    fn added(&self, vocab: &Vocab) -> Vec<(u32, AddedToken)> {
        let added = self.iter().filter_map(|(id, text, kind)| {
            let special = self.kind(id, kind) != Kind::Text;
            let token = AddedToken::from(text, special).normalized(false);
            (special || kind == token_type::USER_DEFINED).then_some((id, token))
        });
        // For a duplicate text the vocabulary has the later id.
        added.filter(|(id, token)| vocab.get(&token.content) == Some(id)).collect()
    }

    fn vocab(&self) -> Vocab {
        self.iter().map(|(id, text, _)| (text.to_owned(), id)).collect()
    }

    fn stop_tokens(&self) -> Vec<u32> {
        let named = self
            .iter()
            .filter(|&(id, text, kind)| self.kind(id, kind) == Kind::Control && END_NAMES.contains(&text));
        // In gpt-oss `<|end|>` ends a message of an answer, as in llama.cpp.
        let is_harmony = self.texts.contains(&"<|call|>");
        let named = named.filter(|(_, text, _)| !(is_harmony && *text == "<|end|>"));
        let mut ids: Vec<u32> = named.map(|(id, ..)| id).chain(self.ends.iter().copied()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn frame(&self, add_bos: bool) -> Result<Frame, TokenizerError> {
        let wanted = |key: &str, default| self.file.bool(key).map(|value| value.unwrap_or(default));
        let bos = wanted("tokenizer.ggml.add_bos_token", add_bos)?.then_some(self.roles.bos).flatten();
        let eos = wanted("tokenizer.ggml.add_eos_token", false)?.then_some(self.roles.eos).flatten();
        Ok(Frame::Fixed { before: bos.into_iter().collect(), after: eos.into_iter().collect() })
    }
}

/// Builds byte-level BPE with the file's merges.
fn byte_level(tokens: &Tokens<'_>) -> Result<Parts, TokenizerError> {
    let file = tokens.file;
    let malformed = |detail| TokenizerError::Malformed { path: file.path().to_path_buf(), detail };
    let name = file.str("tokenizer.ggml.pre")?.unwrap_or("default");
    let pre = PreTokenizer::by_name(name).ok_or_else(|| TokenizerError::Unsupported {
        path: file.path().to_path_buf(),
        what: "pre-tokenizer",
        name: name.to_owned(),
        supported: pre_tokenizer::SUPPORTED,
    })?;
    let key = "tokenizer.ggml.merges";
    let lines = file.strings(key)?.ok_or_else(|| missing(file, key))?;
    let merges: Option<Merges> = lines.iter().map(|line| split_merge(line)).collect();
    let vocab = tokens.vocab();
    Ok(Parts {
        added: tokens.added(&vocab),
        vocab,
        merges: merges.ok_or_else(|| malformed(format!("`{key}` has an entry that is not two tokens")))?,
        unknown: None,
        fuse_unknown: false,
        byte_fallback: false,
        ignore_merges: pre.ignore_merges,
        normalizer: None,
        pre_tokenizer: Some(pre.build().map_err(malformed)?),
        frame: tokens.frame(pre.add_bos)?,
    })
}

/// Splits a `left right` line. The first character belongs to the left token even if it is a space.
fn split_merge(line: &str) -> Option<(String, String)> {
    let first = line.chars().next()?.len_utf8();
    let at = first + line.get(first..)?.find(' ')?;
    Some((line[..at].to_owned(), line[at + 1..].to_owned()))
}

/// Builds SentencePiece BPE: merges by score, and bytes for characters without a piece.
fn sentencepiece(tokens: &Tokens<'_>, space_prefix: bool) -> Result<Parts, TokenizerError> {
    let file = tokens.file;
    let malformed = |detail| TokenizerError::Malformed { path: file.path().to_path_buf(), detail };
    let key = "tokenizer.ggml.scores";
    let scores = file.f32s(key)?.ok_or_else(|| missing(file, key))?;
    if scores.len() != tokens.texts.len() {
        return Err(malformed(format!("{} tokens have {} scores", tokens.texts.len(), scores.len())));
    }
    // Merges of ordinary text must not yield special tokens or byte pieces.
    let mergeable = |id: u32, text: &str, kind: i64| {
        tokens.kind(id, kind) == Kind::Text && kind != token_type::BYTE && byte_piece(text).is_none()
    };
    let pieces: Vec<Piece<'_>> = tokens
        .iter()
        .zip(scores)
        .filter(|&((id, text, kind), _)| mergeable(id, text, kind))
        .map(|((id, text, _), score)| Piece { id, text, score })
        .collect();
    let space = || Replace::new(" ", SPACE).map_err(|error| malformed(error.to_string()));
    let mut normalizers = vec![NormalizerWrapper::Replace(space()?)];
    if space_prefix {
        normalizers.insert(0, NormalizerWrapper::Prepend(Prepend::new(SPACE.to_owned())));
    }
    let vocab = tokens.vocab();
    let unknown =
        tokens.unknown.or_else(|| Some(tokens.iter().find(|token| token.2 == token_type::UNKNOWN)?.0));
    Ok(Parts {
        added: tokens.added(&vocab),
        byte_fallback: (0..=u8::MAX).all(|byte| vocab.contains_key(&format!("<0x{byte:02X}>"))),
        vocab,
        merges: sentencepiece::merges(&pieces),
        unknown: unknown.map(|id| tokens.texts[id as usize].to_owned()),
        fuse_unknown: true,
        ignore_merges: false,
        normalizer: Some(NormalizerWrapper::Sequence(Sequence::new(normalizers))),
        pre_tokenizer: None,
        frame: tokens.frame(true)?,
    })
}
