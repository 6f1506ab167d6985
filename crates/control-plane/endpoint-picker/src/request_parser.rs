//! The parts of a request that decide the host: the model, the adapter, and the beginning of the prompt.
//!
//! Unreadable requests are no error here: the chosen host reports the error.

use control_protocol::fleet::beginning_of;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// Bytes of a prompt's beginning that are kept for prefix matching.
pub(crate) const MAX_BEGINNING_BYTES: usize = 32 << 10;

/// Estimated bytes of text per token.
pub(crate) const TOKEN_BYTES: usize = 4;

/// Paths of requests that any host can serve. All other requests concern objects of one host.
const GENERATE: [&str; 16] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/classify",
    "/classify",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
];

/// Tag that Ollama clients append to a model name without a tag.
const TAG: &str = ":latest";

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RequestHead {
    /// The path, without its query.
    pub path: String,
    /// API key, because prefix caches are per key.
    pub key: Vec<u8>,
}

impl RequestHead {
    /// Whether the request generates tokens or vectors, which any host can do.
    #[must_use]
    pub(crate) fn generates(&self) -> bool {
        GENERATE.contains(&self.path.as_str())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ParsedRequest {
    /// `model` as sent, without the tag `:latest`.
    #[serde(deserialize_with = "text_or_nothing")]
    pub model: String,
    pub adapter: AdapterField,
    /// System prompt of Anthropic's and Ollama's API, which precedes the messages or the prompt.
    system: PromptPrefix,
    messages: PromptPrefix,
    prompt: PromptPrefix,
    /// `input` of an embeddings or classification request.
    input: PromptPrefix,
    /// Documents of a scoring request, under any of their names.
    #[serde(alias = "text_2", alias = "data_2", alias = "items")]
    documents: PromptPrefix,
}

impl ParsedRequest {
    /// Parses a body; a body that cannot be parsed gives an empty request.
    #[must_use]
    pub fn read(body: &[u8]) -> Self {
        let mut ask: Self = serde_json::from_slice(body).unwrap_or_default();
        // The host also finds an adapter whose name ends with the tag.
        if let Some(name) = ask.model.strip_suffix(TAG) {
            ask.model.truncate(name.len());
        }
        let system = std::mem::take(&mut ask.system);
        let prompts = [&mut ask.messages, &mut ask.prompt];
        if let Some(prompt) = prompts.into_iter().find(|prompt| prompt.bytes > 0) {
            prompt.prepend(system);
        }
        ask
    }

    /// Returns the prompt fields; a valid request has one.
    fn prompts(&self) -> [&PromptPrefix; 4] {
        [&self.messages, &self.prompt, &self.input, &self.documents]
    }

    /// Returns the estimated number of prompt tokens.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        let bytes: u64 = self.prompts().iter().map(|prompt| prompt.bytes).sum();
        bytes.div_ceil(TOKEN_BYTES as u64)
    }

    #[must_use]
    pub(crate) fn beginning(&self) -> &[u8] {
        let said = self.prompts().into_iter().find(|prompt| prompt.bytes > 0);
        said.map_or(&[], |prompt| &prompt.beginning)
    }
}

/// Value of the `adapter` field.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub enum AdapterField {
    /// The field is absent or unusable.
    #[default]
    Not,
    Name(String),
    /// The first bytes of an adapter version's hash.
    Generation(u64),
}

impl<'de> Deserialize<'de> for AdapterField {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        value.deserialize_any(NamedVisitor)
    }
}

/// Reads a name, or the `generation` of an object; ignores all other values.
struct NamedVisitor;

impl<'de> Visitor<'de> for NamedVisitor {
    type Value = AdapterField;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("anything")
    }

    fn visit_str<E>(self, name: &str) -> Result<AdapterField, E> {
        Ok(if name.is_empty() { AdapterField::Not } else { AdapterField::Name(name.to_owned()) })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<AdapterField, A::Error> {
        let mut named = AdapterField::Not;
        while let Some(field) = fields.next_key::<String>()? {
            if field == "generation" {
                let Generation(generation) = fields.next_value()?;
                named = beginning_of(&generation).map_or(AdapterField::Not, AdapterField::Generation);
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(named)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<AdapterField, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(AdapterField::Not)
    }

    fn visit_u64<E>(self, _: u64) -> Result<AdapterField, E> {
        Ok(AdapterField::Not)
    }

    fn visit_i64<E>(self, _: i64) -> Result<AdapterField, E> {
        Ok(AdapterField::Not)
    }

    fn visit_f64<E>(self, _: f64) -> Result<AdapterField, E> {
        Ok(AdapterField::Not)
    }

    fn visit_bool<E>(self, _: bool) -> Result<AdapterField, E> {
        Ok(AdapterField::Not)
    }

    fn visit_unit<E>(self) -> Result<AdapterField, E> {
        Ok(AdapterField::Not)
    }
}

/// Text of `generation`; empty if the value is not text.
#[derive(Deserialize)]
#[serde(transparent)]
struct Generation(#[serde(deserialize_with = "text_or_nothing")] String);

/// Reads a text; any other value gives an empty text.
fn text_or_nothing<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    let mut prompt = PromptPrefix::default();
    PromptVisitor(&mut prompt).deserialize(value)?;
    Ok(if prompt.is_text { String::from_utf8(prompt.beginning).unwrap_or_default() } else { String::new() })
}

/// A prompt of any form: all texts and token ids in it, concatenated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct PromptPrefix {
    beginning: Vec<u8>,
    bytes: u64,
    /// Whether the value is a single text.
    is_text: bool,
}

impl PromptPrefix {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        let free = MAX_BEGINNING_BYTES - self.beginning.len();
        self.beginning.extend_from_slice(&bytes[..bytes.len().min(free)]);
    }

    /// Puts `before` in front of the prompt.
    fn prepend(&mut self, before: Self) {
        let behind = std::mem::replace(self, before);
        let bytes = self.bytes + behind.bytes;
        self.push(&behind.beginning);
        self.bytes = bytes;
    }
}

impl<'de> Deserialize<'de> for PromptPrefix {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        let mut prompt = Self::default();
        PromptVisitor(&mut prompt).deserialize(value)?;
        Ok(prompt)
    }
}

/// Appends all texts and token ids of a value to a prompt.
struct PromptVisitor<'a>(&'a mut PromptPrefix);

impl<'de> DeserializeSeed<'de> for PromptVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("anything")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.0.is_text = self.0.bytes == 0;
        self.0.push(text.as_bytes());
        Ok(())
    }

    fn visit_u64<E>(self, token: u64) -> Result<(), E> {
        self.0.push(&token.to_le_bytes()[..TOKEN_BYTES]);
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(PromptVisitor(&mut *self.0))?.is_some() {}
        self.0.is_text = false;
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        while fields.next_key::<IgnoredAny>()?.is_some() {
            fields.next_value_seed(PromptVisitor(&mut *self.0))?;
        }
        self.0.is_text = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_and_prompt_are_read_whatever_their_form() {
        let ask = ParsedRequest::read(
            br#"{"model":"base:a","messages":[{"role":"user","content":"Hello"}],"n":2}"#,
        );
        assert_eq!((ask.model.as_str(), ask.beginning()), ("base:a", &b"userHello"[..]));
        assert_eq!(ask.prompt_tokens(), 3);
        let ask = ParsedRequest::read(br#"{"prompt":[1,2,3],"adapter":"a","model":"m"}"#);
        assert_eq!((&ask.adapter, ask.prompt_tokens()), (&AdapterField::Name("a".to_owned()), 3));
        let ask = ParsedRequest::read(br#"{"input":["a","b"],"model":"m:latest"}"#);
        assert_eq!((ask.model.as_str(), ask.beginning()), ("m", &b"ab"[..]));
        for documents in ["documents", "text_2", "data_2", "items"] {
            let body = format!(r#"{{"model":"m","query":"q","{documents}":["a","b"]}}"#);
            assert_eq!(ParsedRequest::read(body.as_bytes()).beginning(), b"ab", "{documents}");
        }
        let parts = br#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]}]}"#;
        assert_eq!(ParsedRequest::read(parts).beginning(), b"usertextHi");
        assert_eq!(
            ParsedRequest::read(br#"{"model":"m","prompt":"Hi","adapter":{"generation":"ab"}}"#).adapter,
            AdapterField::Not
        );
        for none in
            ["7", "-7", "0.5", "true", "null", "[\"a\"]", "\"\"", r#"{"generation":7}"#, r#"{"x":[{}]}"#]
        {
            let body = format!(r#"{{"model":"m","adapter":{none},"prompt":"Hi"}}"#);
            let ask = ParsedRequest::read(body.as_bytes());
            assert_eq!(
                (ask.model.as_str(), &ask.adapter, ask.beginning()),
                ("m", &AdapterField::Not, &b"Hi"[..]),
                "{none}"
            );
        }
        let parts = br#"{"model":"m","messages":[{"role":"user","content":"Hi"}],"system":[{"type":"text","text":"Be brief."}]}"#;
        assert_eq!(ParsedRequest::read(parts).beginning(), b"textBe brief.userHi");
        let hash = "0b".repeat(32);
        let body = format!(r#"{{"model":"m","adapter":{{"generation":"{hash}"}}}}"#);
        assert_eq!(
            ParsedRequest::read(body.as_bytes()).adapter,
            AdapterField::Generation(0x0b0b_0b0b_0b0b_0b0b)
        );
    }

    #[test]
    fn what_cannot_be_read_asks_for_nothing() {
        for body in ["", "{", "[]", "7", r#"{"model":7}"#, r#"{"model":["a"]}"#, &"[".repeat(100_000)] {
            assert_eq!(ParsedRequest::read(body.as_bytes()).model, "", "{:.20}", body);
        }
    }

    #[test]
    fn no_more_of_a_prompt_is_kept_than_the_limit() {
        let body = format!(r#"{{"model":"m","prompt":["{0}","{0}"]}}"#, "x".repeat(MAX_BEGINNING_BYTES - 1));
        let ask = ParsedRequest::read(body.as_bytes());
        assert_eq!(ask.beginning().len(), MAX_BEGINNING_BYTES);
        assert_eq!(ask.prompt_tokens(), (2 * MAX_BEGINNING_BYTES as u64 - 2).div_ceil(4));
        let long = "x".repeat(MAX_BEGINNING_BYTES - 1);
        let ask = ParsedRequest::read(format!(r#"{{"prompt":"{long}","system":"{long}"}}"#).as_bytes());
        assert_eq!(ask.beginning().len(), MAX_BEGINNING_BYTES);
        assert_eq!(ask.prompt_tokens(), (2 * MAX_BEGINNING_BYTES as u64 - 2).div_ceil(4));
    }
}
