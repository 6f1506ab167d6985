//! The bodies of answers, as borrowed views: serializing one allocates only the output.

use receipts::Receipt;
use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::{adapter_stages::AdapterStage, structured::SchemaWarning, tools::scan_result::CallKind};
use crate::usage::{FinishReason, Usage};

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct GenerationEnvelope<'a> {
    /// Unique id: `chatcmpl-` or `cmpl-` and random digits.
    pub id: &'a str,
    /// Type of the body.
    pub object: &'static str,
    /// Creation time in seconds since 1970.
    pub created: u64,
    /// The model as the request named it.
    pub model: &'a str,
    /// Content hash of the adapter; null for the base model.
    pub adapter_generation: Option<&'a str>,
}

#[derive(Debug, Serialize)]
pub(crate) struct GenerationBody<'a, C> {
    #[serde(flatten)]
    pub envelope: GenerationEnvelope<'a>,
    pub choices: &'a [C],
    /// Token ids and log-probabilities of a chat's prompt.
    #[serde(flatten)]
    pub prompt: PromptReport<'a>,
    /// `None` leaves the field out, `Some(None)` sends null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    #[serde(flatten)]
    pub end: EndReport<'a>,
}

/// Fields about the whole answer; in a stream, the last chunk has them.
#[derive(Debug, Default, Serialize)]
pub(crate) struct EndReport<'a> {
    /// Schema keywords that the grammar does not enforce.
    #[serde(skip_serializing_if = "<[SchemaWarning]>::is_empty")]
    pub warnings: &'a [SchemaWarning],
    /// Signed record of the answer, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Receipt>,
}

/// Token ids and log-probabilities of a prompt, if requested, in vLLM's format.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PromptReport<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    /// Log-probabilities per token; null for the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<TokenLikelihoods>>>,
}

/// A JSON object from token id to log-probability; the prompt's own token comes first.
#[derive(Debug, PartialEq)]
pub(crate) struct TokenLikelihoods(pub Vec<(u32, RankedToken)>);

/// A token with its log-probability.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct RankedToken {
    /// Natural logarithm of the probability.
    pub logprob: f32,
    /// Rank among all tokens, from 1; null if the token is not among the requested alternatives.
    pub rank: Option<usize>,
    /// The token as text; `bytes:\x..` if the token is not valid UTF-8.
    pub decoded_token: String,
}

impl Serialize for TokenLikelihoods {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, ranked)| (token, ranked)))
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice<'a> {
    /// Index among all choices (`n` per prompt), from 0.
    pub index: usize,
    pub message: AssistantMessage<'a>,
    /// Null unless the request asks for log-probabilities.
    pub logprobs: Option<ChatLogprobs<'a>>,
    pub finish_reason: FinishReason,
    /// Stages of an answer that switches adapters; otherwise absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter_stages: Option<Vec<AdapterStage<'a>>>,
    /// Token ids, a stop string's included; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct AssistantMessage<'a> {
    pub role: &'static str,
    /// The text; null in a message that only calls tools.
    pub content: Option<&'a str>,
    /// Part of OpenAI's format; always null here.
    pub refusal: Option<&'a str>,
    /// Reasoning content; absent if there is none or if reasoning is not parsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// Absent if there are no calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall<'a>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ToolCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
    /// Id, to which the tool's result refers; only in the first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    /// `function` or `custom`, in the first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<Function<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<CustomCall<'a>>,
}

impl<'a> ToolCall<'a> {
    /// Returns a call, or a part of one, in OpenAI's format; `begun` is the call's id and the tool's name.
    #[must_use]
    pub(crate) fn of(kind: CallKind, begun: Option<(&'a str, &'a str)>, text: &'a str) -> Self {
        let (id, name) = begun.unzip();
        let (word, function, custom) = match kind {
            CallKind::Function => ("function", Some(Function { name, arguments: text }), None),
            CallKind::Custom => ("custom", None, Some(CustomCall { name, input: text })),
        };
        Self { index: None, id, r#type: id.map(|_| word), function, custom }
    }
}

#[derive(Debug, Serialize)]
pub struct Function<'a> {
    /// Name of the function, in the call's first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// JSON text, or the next part of it.
    pub arguments: &'a str,
}

#[derive(Debug, Serialize)]
pub(crate) struct CustomCall<'a> {
    /// Name of the tool, in the call's first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// Input text, or the next part of it.
    pub input: &'a str,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatDelta<'a> {
    pub index: usize,
    pub delta: Delta<'a>,
    pub logprobs: Option<ChatLogprobs<'a>>,
    /// Null until the last chunk.
    pub finish_reason: Option<FinishReason>,
    /// Stages of an answer that switches adapters, in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter_stages: Option<Vec<AdapterStage<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Delta<'a> {
    /// Only in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// New text; absent in the last chunk, and null in the first chunk if the answer may call tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall<'a>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct TextChoice<'a> {
    pub index: usize,
    pub text: &'a str,
    pub logprobs: Option<TextLogprobs>,
    pub finish_reason: Option<FinishReason>,
    /// Stages of an answer that switches adapters, in a stream's last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter_stages: Option<Vec<AdapterStage<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    #[serde(flatten)]
    pub prompt: PromptReport<'a>,
}

/// An otherwise empty chunk with an update of provisional text; clients that do not know its field ignore it.
#[derive(Debug, Serialize)]
pub(crate) struct DraftEvent<'a, C> {
    #[serde(flatten)]
    pub choice: C,
    #[serde(flatten)]
    pub draft: DraftUpdate<'a>,
}

/// Updates of provisional text, each in a field of its own.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DraftUpdate<'a> {
    /// Possible continuation of the text; the next chunk or retraction decides whether it stands.
    Provisional {
        /// Text after all text so far.
        text: &'a str,
    },
    /// Part of the provisional text is wrong.
    Retract {
        /// Number of characters to remove from its end.
        characters: usize,
    },
}

/// Log-probabilities in the format of chat completions.
#[derive(Debug, PartialEq, Serialize)]
pub struct ChatLogprobs<'a> {
    pub content: Vec<TokenLogprob<'a>>,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct TokenLogprob<'a> {
    #[serde(flatten)]
    pub token: Alternative<'a>,
    pub top_logprobs: Vec<Alternative<'a>>,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct Alternative<'a> {
    /// The token as text; `bytes:\x..` if the token is not valid UTF-8.
    pub token: String,
    /// Natural logarithm of the probability.
    pub logprob: f32,
    /// Bytes of the token, which may be part of a UTF-8 character.
    pub bytes: &'a [u8],
}

/// Log-probabilities in the format of completions: parallel arrays.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct TextLogprobs {
    /// Offset of each token's text, in characters.
    pub text_offset: Vec<usize>,
    /// Log-probabilities; null for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    pub tokens: Vec<String>,
    /// The most likely tokens at each position; null for the first token of a prompt.
    pub top_logprobs: Vec<Option<TopLogprobs>>,
}

/// A JSON object from token text to log-probability, most likely first.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}
