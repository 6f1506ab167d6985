//! The text files beside an adapter's weights: a chat template, and the tokenizer that the adapter was
//! trained with.
//!
//! The server can use the chat template for that adapter alone, but not the tokenizer, since token ids mean
//! the base model's tokens. [`AdapterText::differences`] lists special and added tokens that differ from
//! the base model's.

use std::{collections::BTreeMap, fmt, io};

use serde::{Deserialize, de::DeserializeOwned};

use crate::{
    chat_template::TemplateError,
    tokenizer::from_directory::{TemplateJson, TokenName},
};

const TEMPLATE_FILE: &str = "chat_template.jinja";
/// Holds special tokens; files of earlier versions also hold the template and the added tokens.
const CONFIG_FILE: &str = "tokenizer_config.json";
/// Holds added tokens in files of earlier versions.
const ADDED_FILE: &str = "added_tokens.json";
const TOKENIZER_FILE: &str = "tokenizer.json";

/// Maximum length of an adapter's chat template in bytes; the longest templates of models have about 30,000.
pub const MAX_TEMPLATE_BYTES: u64 = 128 << 10;
/// Maximum size of an adapter's `tokenizer_config.json` or `added_tokens.json` in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Maximum size of an adapter's `tokenizer.json` in bytes; files with 260,000 tokens have 33 MB.
const MAX_TOKENIZER_BYTES: u64 = 64 << 20;

/// Names of the files that are read, each with its maximum size in bytes.
pub const FILES: [(&str, u64); 4] = [
    (TEMPLATE_FILE, MAX_TEMPLATE_BYTES),
    (CONFIG_FILE, MAX_CONFIG_BYTES),
    (ADDED_FILE, MAX_CONFIG_BYTES),
    (TOKENIZER_FILE, MAX_TOKENIZER_BYTES),
];

/// Maximum number of differing tokens that are listed one by one.
const MAX_NOTES: usize = 8;
/// Maximum number of characters of a token in a message.
const MAX_TOKEN_CHARS: usize = 64;

/// Why the text files beside an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AdapterTextError {
    /// A file cannot be read.
    #[error("'{name}' beside the adapter cannot be read: {source}; correct the file, or remove it")]
    Read {
        /// Name of the unreadable file.
        name: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file is not valid JSON of the expected shape.
    #[error("cannot use '{name}' beside the adapter: {source}; save the tokenizer again, or remove the file")]
    Json {
        /// Name of the unusable file.
        name: &'static str,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// The chat template cannot be compiled or decoded.
    #[error(
        "the chat template in '{name}' beside the adapter cannot be used: {reason}; correct or remove it"
    )]
    Template {
        /// Name of the file with the template.
        name: &'static str,
        /// Description of the template's error.
        reason: String,
    },
}

/// Content of the text files beside an adapter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdapterText {
    /// The chat template with the name of its file.
    template: Option<(String, &'static str)>,
    bos: Option<String>,
    eos: Option<String>,
    /// Added tokens by id, each with the name of the file that defines it.
    added: BTreeMap<u32, (String, &'static str)>,
}

/// Tokens of a base model, for comparison.
#[derive(Clone, Copy)]
pub struct BaseTokens<'a> {
    /// Text of the beginning-of-sequence token, if any.
    pub bos: Option<&'a str>,
    /// Ids of the tokens that end answers.
    pub end_tokens: &'a [u32],
    /// Returns the bytes of a token, or an empty slice if the token does not exist.
    pub bytes: &'a dyn Fn(u32) -> &'a [u8],
}

impl fmt::Debug for BaseTokens<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BaseTokens").field("bos", &self.bos).finish_non_exhaustive()
    }
}

#[derive(Default, Deserialize)]
struct ConfigJson {
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    chat_template: Option<TemplateJson>,
    #[serde(default)]
    added_tokens_decoder: BTreeMap<u32, TokenName>,
}

#[derive(Default, Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedJson>,
}

#[derive(Deserialize)]
struct AddedJson {
    id: u32,
    content: String,
}

impl AdapterText {
    /// Reads those [`FILES`] that exist; `file` receives a name and the maximum size in bytes.
    ///
    /// # Errors
    /// If a file cannot be read or has no valid content.
    pub fn read(
        mut file: impl FnMut(&'static str, u64) -> io::Result<Option<Vec<u8>>>,
    ) -> Result<Self, AdapterTextError> {
        let mut found = FILES.map(|_| None);
        for (found, (name, limit)) in found.iter_mut().zip(FILES) {
            *found = file(name, limit).map_err(|source| AdapterTextError::Read { name, source })?;
        }
        let [template, config, added, tokenizer] = found;
        let config: ConfigJson = parsed(CONFIG_FILE, config)?;
        let listed: BTreeMap<String, u32> = parsed(ADDED_FILE, added)?;
        let tokenizer: TokenizerJson = parsed(TOKENIZER_FILE, tokenizer)?;
        let of_config = config.added_tokens_decoder.iter();
        let of_config = of_config.map(|(id, token)| (*id, (token.text().to_owned(), CONFIG_FILE)));
        let of_list = listed.into_iter().map(|(token, id)| (id, (token, ADDED_FILE)));
        let of_tokenizer = tokenizer.added_tokens.into_iter();
        let of_tokenizer = of_tokenizer.map(|token| (token.id, (token.content, TOKENIZER_FILE)));
        let text = |token: Option<TokenName>| token.map(|token| token.text().to_owned());
        Ok(Self {
            template: chat_template(template, config.chat_template)?,
            added: of_list.chain(of_tokenizer).chain(of_config).collect(),
            bos: text(config.bos_token),
            eos: text(config.eos_token),
        })
    }

    /// Returns the chat template if it differs from the base model's, apart from a line break at the end.
    #[must_use]
    pub fn own_template(&self, base: Option<&str>) -> Option<&str> {
        let plain = |template: &str| template.trim_end_matches('\n').to_owned();
        let own = self.template.as_ref().map(|(source, _)| source.as_str());
        own.filter(|own| Some(plain(own)) != base.map(plain))
    }

    /// Returns the error for a chat template that failed with `error`, with the name of its file.
    #[must_use]
    pub fn refused_template(&self, error: &TemplateError) -> AdapterTextError {
        let reason = match error {
            TemplateError::Syntax(syntax) => syntax.clone(),
            other => other.to_string(),
        };
        AdapterTextError::Template {
            name: self.template.as_ref().map_or(TEMPLATE_FILE, |(_, name)| name),
            reason,
        }
    }

    /// Describes how the tokenizer differs from the base model's, which is used nevertheless; empty if no
    /// difference is known.
    #[must_use]
    pub fn differences(&self, base: &BaseTokens<'_>) -> Vec<String> {
        const USED: &str = "the base model's tokenizer is used";
        let ends_answers =
            |token: &str| base.end_tokens.iter().any(|end| (base.bytes)(*end) == token.as_bytes());
        let mut notes = Vec::new();
        if let (Some(own), Some(bos)) = (&self.bos, base.bos)
            && own != bos
        {
            let (own, bos) = (shortened(own), shortened(bos));
            notes.push(format!(
                "`bos_token` of {CONFIG_FILE} is {own}, but the base model's is {bos}; {USED}"
            ));
        }
        if let Some(own) = self.eos.as_ref().filter(|own| !ends_answers(own)) {
            let own = shortened(own);
            notes.push(format!(
                "`eos_token` of {CONFIG_FILE} is {own}, which is not an end token of the base model; {USED}"
            ));
        }
        let differing = self.added.iter().filter(|(id, (token, _))| (base.bytes)(**id) != token.as_bytes());
        let mut differing = differing.map(|(id, (token, file))| {
            let is_new = (base.bytes)(*id).is_empty();
            let what =
                if is_new { "which the base model does not have" } else { "which is another token there" };
            format!("{file} gives {} the id {id}, {what}; {USED}", shortened(token))
        });
        notes.extend(differing.by_ref().take(MAX_NOTES));
        let rest = differing.count();
        notes.extend(
            (rest > 0).then(|| format!("{rest} more tokens differ from those of the base model; {USED}")),
        );
        notes
    }
}

/// Returns the chat template with its file name; `chat_template.jinja` takes precedence over the
/// configuration.
fn chat_template(
    own_file: Option<Vec<u8>>,
    in_config: Option<TemplateJson>,
) -> Result<Option<(String, &'static str)>, AdapterTextError> {
    let refused = |name, reason: String| Err(AdapterTextError::Template { name, reason });
    let found = match own_file.map(String::from_utf8) {
        Some(Err(error)) => return refused(TEMPLATE_FILE, error.to_string()),
        Some(Ok(source)) => Some((source, TEMPLATE_FILE)),
        None => in_config.and_then(TemplateJson::default_one).map(|source| (source, CONFIG_FILE)),
    };
    match found {
        Some((source, name)) if source.len() as u64 > MAX_TEMPLATE_BYTES => {
            refused(name, format!("it has more than {MAX_TEMPLATE_BYTES} bytes"))
        }
        Some((source, name)) if source.trim().is_empty() => refused(name, "it is empty".to_owned()),
        found => Ok(found),
    }
}

fn shortened(token: &str) -> String {
    let short: String = token.chars().take(MAX_TOKEN_CHARS).collect();
    if short.len() < token.len() { format!("{short:?}...") } else { format!("{short:?}") }
}

fn parsed<T: Default + DeserializeOwned>(
    name: &'static str,
    json: Option<Vec<u8>>,
) -> Result<T, AdapterTextError> {
    let parsed = json.map(|json| serde_json::from_slice(&json)).transpose();
    Ok(parsed.map_err(|source| AdapterTextError::Json { name, source })?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(token: u32) -> &'static [u8] {
        [&b"<s>"[..], b"</s>", b"<end>"].get(token as usize).copied().unwrap_or_default()
    }

    const BASE: BaseTokens<'_> = BaseTokens { bos: Some("<s>"), end_tokens: &[1, 2], bytes: &bytes };

    fn read(files: &[(&str, &str)]) -> Result<AdapterText, AdapterTextError> {
        AdapterText::read(|name, _| {
            let found = files.iter().find(|(known, _)| *known == name);
            Ok(found.map(|(_, text)| text.as_bytes().to_vec()))
        })
    }

    fn own(files: &[(&str, &str)]) -> Option<String> {
        read(files).unwrap().own_template(Some("the base's")).map(str::to_owned)
    }

    #[test]
    fn the_template_is_the_file_of_its_own_or_the_one_in_the_configuration() {
        let config = (CONFIG_FILE, r#"{"chat_template": "in the configuration"}"#);
        assert_eq!(read(&[]).unwrap(), AdapterText::default());
        assert_eq!(own(&[config]).as_deref(), Some("in the configuration"));
        assert_eq!(own(&[config, (TEMPLATE_FILE, "its own")]).as_deref(), Some("its own"));
        assert_eq!(own(&[(TEMPLATE_FILE, "the base's\n")]), None);
        let several = r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
        assert_eq!(own(&[(CONFIG_FILE, several)]).as_deref(), Some("d"));
        assert_eq!(read(&[config]).unwrap().own_template(None), Some("in the configuration"));
    }

    #[test]
    fn a_template_that_is_empty_or_too_long_is_refused_by_the_name_of_its_file() {
        let long = "x".repeat(MAX_TEMPLATE_BYTES as usize + 1);
        for source in [" \n", &long] {
            let config = serde_json::json!({ "chat_template": source }).to_string();
            for (name, text) in [(TEMPLATE_FILE, source), (CONFIG_FILE, &config)] {
                let refused = read(&[(name, text)]).unwrap_err().to_string();
                assert!(refused.contains("chat template") && refused.contains(name), "{refused}");
            }
        }
    }

    #[test]
    fn a_tokenizer_like_the_bases_differs_in_nothing() {
        let config = r#"{"bos_token": "<s>", "eos_token": {"content": "<end>"}, "pad_token": "<pad>",
            "added_tokens_decoder": {"1": {"content": "</s>"}}}"#;
        let tokenizer =
            r#"{"added_tokens": [{"id": 0, "content": "<s>", "special": true}], "model": {"vocab": {}}}"#;
        let files = [(CONFIG_FILE, config), (ADDED_FILE, r#"{"<end>": 2}"#), (TOKENIZER_FILE, tokenizer)];
        assert_eq!(read(&files).unwrap().differences(&BASE), [""; 0]);
    }

    #[test]
    fn every_token_that_is_another_one_is_told() {
        let files = [
            (CONFIG_FILE, r#"{"bos_token": "<b>", "eos_token": "<|stop|>"}"#),
            (ADDED_FILE, r#"{"<new>": 3, "<moved>": 2}"#),
        ];
        let notes = read(&files).unwrap().differences(&BASE);
        let expected =
            [["bos_token", "<b>"], ["eos_token", "<|stop|>"], ["<moved>", "id 2"], ["<new>", "id 3"]];
        assert_eq!(notes.len(), expected.len(), "{notes:?}");
        for (notes, parts) in notes.iter().zip(expected) {
            assert!(parts.iter().all(|part| notes.contains(part)), "{notes}");
        }
        let many: BTreeMap<String, u32> = (0..20).map(|id| (format!("<{id}>"), 100 + id)).collect();
        let many = serde_json::to_string(&many).unwrap();
        let notes = read(&[(ADDED_FILE, &many)]).unwrap().differences(&BASE);
        assert_eq!(notes.len(), MAX_NOTES + 1);
        assert!(notes[MAX_NOTES].starts_with("12 more"), "{}", notes[MAX_NOTES]);
        let long = format!("{{\"{}\": 100}}", "x".repeat(1000));
        assert!(read(&[(ADDED_FILE, &long)]).unwrap().differences(&BASE)[0].len() < 300);
    }

    #[test]
    fn files_that_are_broken_are_refused_by_name() {
        for name in [CONFIG_FILE, ADDED_FILE, TOKENIZER_FILE] {
            let refused = read(&[(name, "{")]).unwrap_err().to_string();
            assert!(refused.contains(name), "{refused}");
        }
    }
}
