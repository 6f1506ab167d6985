//! Reads a tokenizer from a model directory: `tokenizer.json`, `tokenizer_config.json`,
//! `chat_template.jinja`.

use std::path::{Path, PathBuf};

use model_files::{generation_defaults::GenerationDefaults, whole_file};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokenizers::{
    AddedToken,
    models::bpe::{Merges, Vocab},
};

use super::{
    Roles, Tokenizer, TokenizerError, expressions, limits,
    pipeline::{Frame, Parts, Pipeline},
    vocabulary::{Kind, Token, TokenEncoding, Vocabulary},
};

/// The model type of a `tokenizer.json`, read before the vocabulary, whose form depends on it.
#[derive(Deserialize)]
struct TokenizerModelType {
    model: ModelKind,
}

#[derive(Deserialize)]
struct ModelKind {
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// The parts of a `tokenizer.json` that this module uses or passes on.
#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedTokenJson>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
    model: BpeJson,
}

#[derive(Deserialize)]
struct AddedTokenJson {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
struct BpeJson {
    vocab: Vocab,
    merges: Vec<MergeJson>,
    unk_token: Option<String>,
    #[serde(default)]
    fuse_unk: Option<bool>,
    #[serde(default)]
    byte_fallback: Option<bool>,
    #[serde(default)]
    ignore_merges: Option<bool>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    dropout: Option<f32>,
}

/// A merge: `["a", "b"]`, or `"a b"` in older files.
#[derive(Deserialize)]
#[serde(untagged)]
enum MergeJson {
    Pair(String, String),
    Line(String),
}

/// The fields of `tokenizer_config.json` that matter here.
#[derive(Default, Deserialize)]
struct ConfigJson {
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    pad_token: Option<TokenName>,
    chat_template: Option<TemplateJson>,
}

/// A token, alone or with its options for splitting text.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum TokenName {
    Text(String),
    Token { content: String },
}

/// A chat template, or several named ones.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum TemplateJson {
    One(String),
    Several(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
pub(crate) struct NamedTemplate {
    name: String,
    template: String,
}

impl TokenName {
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Token { content: text } => text,
        }
    }
}

impl Tokenizer {
    /// Reads the tokenizer of a model directory in Hugging Face's layout.
    ///
    /// # Errors
    /// If `tokenizer.json` is missing or is not a supported byte pair encoding, or a file cannot be read.
    pub fn from_directory(directory: &Path) -> Result<Self, TokenizerError> {
        let path = directory.join("tokenizer.json");
        let read_error = |source| TokenizerError::Read { path: path.clone(), source };
        let json = whole_file::read(&path, limits::MAX_TOKENIZER_JSON_BYTES).map_err(read_error)?;
        let config_path = directory.join("tokenizer_config.json");
        let config: ConfigJson = match read_text(&config_path)? {
            Some(text) => parse(&config_path, text.as_bytes())?,
            None => ConfigJson::default(),
        };
        let template = read_text(&directory.join("chat_template.jinja"))?;
        let mut stop_tokens = GenerationDefaults::from_directory(directory)?.eos_token_ids;
        let mut tokenizer = Self::from_json(&path, &json, &config)?;
        stop_tokens.extend(tokenizer.roles.eos);
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        tokenizer.stop_tokens = stop_tokens;
        tokenizer.chat_template =
            template.or_else(|| config.chat_template.and_then(TemplateJson::default_one));
        Ok(tokenizer)
    }

    fn from_json(path: &Path, json: &[u8], config: &ConfigJson) -> Result<Self, TokenizerError> {
        let malformed = |detail| TokenizerError::Malformed { path: path.to_path_buf(), detail };
        let outline: TokenizerModelType = parse(path, json)?;
        if let Some(kind) = outline.model.kind.filter(|kind| kind != "BPE") {
            return Err(unsupported(path, "tokenizer model", kind, "BPE"));
        }
        let file: TokenizerJson = parse(path, json)?;
        file.model.check(path)?;
        let (encoding, adds_leading_space) = encoding(path, file.decoder.as_ref())?;
        let added = file.added_tokens.iter().map(|added| Token {
            id: added.id,
            spelling: &added.token.content,
            kind: if added.token.special { Kind::Control } else { Kind::Text },
            literal: true,
        });
        let unknown = file.model.unk_token.as_ref().and_then(|token| file.model.vocab.get(token)).copied();
        let text = file.model.vocab.iter().map(|(spelling, &id)| Token {
            id,
            spelling,
            kind: if unknown == Some(id) { Kind::Unknown } else { Kind::Text },
            literal: false,
        });
        let added = added.map(|token| match token.kind {
            // Ordinary text may yield the unknown token.
            Kind::Control if unknown == Some(token.id) => Token { kind: Kind::Unknown, ..token },
            _ => token,
        });
        let vocabulary = Vocabulary::new(text.chain(added), encoding).map_err(malformed)?;
        let roles = file.roles(config);
        let pipeline = Pipeline::new(file.parts(path)?).map_err(malformed)?;
        let (stop_tokens, chat_template) = (Vec::new(), None);
        let names = vocabulary.control_names();
        Ok(Self { pipeline, vocabulary, names, roles, stop_tokens, adds_leading_space, chat_template })
    }
}

/// Reads a small text file, if it exists.
fn read_text(path: &Path) -> Result<Option<String>, TokenizerError> {
    let error = |source| TokenizerError::Read { path: path.to_path_buf(), source };
    let bytes = whole_file::read_if_there(path, limits::MAX_CONFIG_BYTES).map_err(error)?;
    let text = bytes.map(String::from_utf8).transpose();
    text.map_err(|invalid| error(std::io::Error::new(std::io::ErrorKind::InvalidData, invalid)))
}

fn parse<T: DeserializeOwned>(path: &Path, json: &[u8]) -> Result<T, TokenizerError> {
    serde_json::from_slice(json).map_err(|source| TokenizerError::Json { path: path.to_path_buf(), source })
}

fn unsupported(path: &Path, what: &'static str, name: String, supported: &'static str) -> TokenizerError {
    TokenizerError::Unsupported { path: PathBuf::from(path), what, name, supported }
}

impl TemplateJson {
    /// Returns the template named `default` if there are several.
    pub(crate) fn default_one(self) -> Option<String> {
        match self {
            Self::One(template) => Some(template),
            Self::Several(all) => {
                all.into_iter().find(|named| named.name == "default").map(|named| named.template)
            }
        }
    }
}

impl BpeJson {
    /// Refuses options that only other kinds of models use.
    fn check(&self, path: &Path) -> Result<(), TokenizerError> {
        let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        for (name, set) in [
            ("continuing_subword_prefix", is_set(&self.continuing_subword_prefix)),
            ("end_of_word_suffix", is_set(&self.end_of_word_suffix)),
            ("dropout", self.dropout.is_some_and(|dropout| dropout != 0.0)),
        ] {
            if set {
                return Err(unsupported(path, "BPE option", name.to_owned(), "models without it"));
            }
        }
        Ok(())
    }
}

/// Reads Hugging Face's decoder: returns how tokens spell bytes, and whether decoding removes a leading
/// space.
fn encoding(path: &Path, decoder: Option<&Value>) -> Result<(TokenEncoding, bool), TokenizerError> {
    let kind = |step: &Value| step["type"].as_str().unwrap_or_default().to_owned();
    let Some(decoder) = decoder.filter(|decoder| !decoder.is_null()) else {
        return Err(unsupported(path, "decoder", "null".to_owned(), "ByteLevel, ByteFallback"));
    };
    let steps = match decoder["decoders"].as_array() {
        Some(steps) => steps.as_slice(),
        None => std::slice::from_ref(decoder),
    };
    if steps.iter().any(|step| kind(step) == "ByteLevel") {
        return Ok((TokenEncoding::ByteLevel, false));
    }
    let has = |name: &str| steps.iter().any(|step| kind(step) == name);
    if has("Metaspace") || has("ByteFallback") {
        let strips = |step: &Value| match kind(step).as_str() {
            "Strip" => step["start"].as_u64().is_some_and(|start| start > 0),
            "Metaspace" => step["prepend_scheme"] != "never" && step["add_prefix_space"] != false,
            _ => false,
        };
        return Ok((TokenEncoding::SentencePiece, steps.iter().any(strips)));
    }
    let names: Vec<String> = steps.iter().map(kind).collect();
    Err(unsupported(path, "decoder", names.join("+"), "ByteLevel, ByteFallback, Metaspace"))
}

impl TokenizerJson {
    fn roles(&self, config: &ConfigJson) -> Roles {
        let id = |name: &Option<TokenName>| {
            let name = name.as_ref()?.text();
            let added = self.added_tokens.iter().find(|added| added.token.content == name);
            added.map(|added| added.id).or_else(|| self.model.vocab.get(name).copied())
        };
        Roles { bos: id(&config.bos_token), eos: id(&config.eos_token), pad: id(&config.pad_token) }
    }

    fn parts(self, path: &Path) -> Result<Parts, TokenizerError> {
        let mut added: Vec<(u32, AddedToken)> =
            self.added_tokens.into_iter().map(|added| (added.id, added.token)).collect();
        added.sort_by_key(|(id, _)| *id);
        let merges: Option<Merges> = self.model.merges.into_iter().map(MergeJson::pair).collect();
        let merges = merges.ok_or_else(|| TokenizerError::Malformed {
            path: path.to_path_buf(),
            detail: "`merges` has an entry that is not two tokens".to_owned(),
        })?;
        Ok(Parts {
            vocab: self.model.vocab,
            merges,
            unknown: self.model.unk_token,
            fuse_unknown: self.model.fuse_unk.unwrap_or(false),
            byte_fallback: self.model.byte_fallback.unwrap_or(false),
            ignore_merges: self.model.ignore_merges.unwrap_or(false),
            normalizer: component(path, self.normalizer)?,
            pre_tokenizer: component(path, self.pre_tokenizer)?,
            added,
            // As in transformers, `add_bos_token` of tokenizer_config.json is ignored if a tokenizer.json
            // exists.
            frame: match component(path, self.post_processor)? {
                Some(processor) => Frame::PostProcessor(Box::new(processor)),
                None => Frame::Fixed { before: Vec::new(), after: Vec::new() },
            },
        })
    }
}

impl MergeJson {
    fn pair(self) -> Option<(String, String)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Line(line) => line.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())),
        }
    }
}

/// Parses a normalizer, pre-tokenizer or post-processor of the `tokenizers` crate.
fn component<T: DeserializeOwned>(path: &Path, json: Option<Value>) -> Result<Option<T>, TokenizerError> {
    let json = json.filter(|json| !json.is_null());
    if let Some(json) = &json {
        expressions::check(json)
            .map_err(|detail| TokenizerError::Malformed { path: path.to_path_buf(), detail })?;
    }
    let component = json.map(serde_json::from_value).transpose();
    component.map_err(|source| TokenizerError::Json { path: path.to_path_buf(), source })
}
