//! Converts text to token ids: added tokens, normalizer, pre-tokenizer, byte pair encoding, frame.

use tokenizers::{
    AddedToken, AddedVocabulary, Encoding, Model as _, NormalizerWrapper, OffsetType, PostProcessor as _,
    PostProcessorWrapper, PreTokenizer as _, PreTokenizerWrapper,
    models::bpe::{BPE, Merges, Vocab},
};

use super::{
    error::EncodeError,
    limits,
    options::{AddSpecial, ParseSpecial},
    vocabulary::check_length,
};

#[derive(Debug)]
pub(super) enum Frame {
    Fixed {
        before: Vec<u32>,
        after: Vec<u32>,
    },
    /// The post-processor of a `tokenizer.json`.
    PostProcessor(Box<PostProcessorWrapper>),
}

#[derive(Debug)]
pub(super) struct Parts {
    pub(super) vocab: Vocab,
    pub(super) merges: Merges,
    pub(super) unknown: Option<String>,
    /// Merges consecutive unknown characters into one unknown token.
    pub(super) fuse_unknown: bool,
    pub(super) byte_fallback: bool,
    /// Encodes a word that is itself a token as that token, without merges.
    pub(super) ignore_merges: bool,
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Added tokens with their ids, in ascending order.
    pub(super) added: Vec<(u32, AddedToken)>,
    pub(super) frame: Frame,
}

#[derive(Debug)]
pub(super) struct Pipeline {
    model: BPE,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Recognizes all added tokens.
    parsing: AddedVocabulary,
    /// Recognizes only the added tokens that are not special.
    plain: AddedVocabulary,
    frame: Frame,
}

impl Pipeline {
    /// Checks the components and combines them; the error describes the mismatch.
    pub(super) fn new(parts: Parts) -> Result<Self, String> {
        let Parts { vocab, merges, normalizer, pre_tokenizer, added, frame, .. } = parts;
        check_merges(&vocab, &merges)?;
        let mut builder = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .fuse_unk(parts.fuse_unknown)
            .byte_fallback(parts.byte_fallback)
            .ignore_merges(parts.ignore_merges)
            // The cache would keep words of all callers, per thread: 10,000 words of up to 10 KiB.
            .cache_capacity(0);
        if let Some(unknown) = parts.unknown {
            builder = builder.unk_token(unknown);
        }
        let model = builder.build().map_err(|error| error.to_string())?;
        let parsing = added_vocabulary(added, &model, normalizer.as_ref())?;
        let mut plain = parsing.clone();
        plain.set_encode_special_tokens(true);
        Ok(Self { model, normalizer, pre_tokenizer, parsing, plain, frame })
    }

    pub(super) fn token_id(&self, spelling: &str) -> Option<u32> {
        self.parsing.token_to_id(spelling, &self.model)
    }

    /// Encodes `text` without surrounding tokens.
    pub(super) fn encode(&self, text: &str, parse: ParseSpecial) -> Result<Encoding, EncodeError> {
        let added = match parse {
            ParseSpecial::Yes => &self.parsing,
            ParseSpecial::No => &self.plain,
        };
        let mut words = added.extract_and_normalize(self.normalizer.as_ref(), text);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut words).map_err(EncodeError::Split)?;
        }
        words.tokenize(|word| self.model.tokenize(word.get())).map_err(EncodeError::Split)?;
        words.into_encoding(None, 0, OffsetType::None).map_err(EncodeError::Split)
    }

    /// Returns the ids of an encoding, with the surrounding tokens if `add` says so.
    pub(super) fn framed(&self, encoding: Encoding, add: AddSpecial) -> Result<Vec<u32>, EncodeError> {
        match (&self.frame, add) {
            (_, AddSpecial::No) => Ok(encoding.get_ids().to_vec()),
            (Frame::Fixed { before, after }, AddSpecial::Yes) => {
                Ok([before, encoding.get_ids(), after].concat())
            }
            (Frame::PostProcessor(processor), AddSpecial::Yes) => {
                let framed = processor.process(encoding, None, true).map_err(EncodeError::Split)?;
                Ok(framed.get_ids().to_vec())
            }
        }
    }
}

/// Refuses merges that would panic in the `tokenizers` crate, which copies both halves into a buffer of the
/// longest token's length before the lookup. The crate itself checks that both halves and the result are
/// tokens.
fn check_merges(vocab: &Vocab, merges: &Merges) -> Result<(), String> {
    if merges.len() > limits::MAX_MERGES {
        return Err(format!("{} merges are beyond the limit of {}", merges.len(), limits::MAX_MERGES));
    }
    let longest_bytes = vocab.keys().map(String::len).max().unwrap_or(0);
    match merges.iter().find(|(left, right)| left.len() + right.len() > longest_bytes) {
        Some((left, right)) => {
            let merged: String = left.chars().chain(right.chars()).take(64).collect();
            Err(format!("a merge makes `{merged}`, which is longer than any token of the vocabulary"))
        }
        None => Ok(()),
    }
}

/// Builds the added vocabulary, each token under its id from the file.
fn added_vocabulary(
    added: Vec<(u32, AddedToken)>,
    model: &BPE,
    normalizer: Option<&NormalizerWrapper>,
) -> Result<AddedVocabulary, String> {
    let mut vocabulary = AddedVocabulary::new();
    let ids: Vec<(u32, String)> = added.iter().map(|(id, token)| (*id, token.content.clone())).collect();
    for (_, content) in &ids {
        check_length(content)?;
    }
    vocabulary
        .add_tokens(added.into_iter().map(|(_, token)| token), model, normalizer)
        .map_err(|error| error.to_string())?;
    for (id, content) in ids {
        // The library assigns the next free id to a token that the model does not have.
        let given = vocabulary.token_to_id(&content, model);
        if !content.is_empty() && given != Some(id) {
            return Err(format!("the added token `{content}` has id {id}, but its place is {given:?}"));
        }
    }
    Ok(vocabulary)
}
