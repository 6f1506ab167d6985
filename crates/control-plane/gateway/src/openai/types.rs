//! The bodies that are sent, as borrowed views: serializing one allocates nothing but the output.

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::{structured::SchemaWarning, tools::scan_result::CallKind};
use crate::usage::{FinishReason, Usage};

/// What every answer about a generation carries.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct GenerationEnvelope<'a> {
    /// Number of the answer, `chatcmpl-` or `cmpl-` and random digits; no other answer has it.
    pub id: &'a str,
    /// What kind of body this is.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model as the request named it.
    pub model: &'a str,
    /// Content hash of the adapter; null for the base model.
    pub adapter_generation: Option<&'a str>,
}

/// A whole answer or a chunk of one.
#[derive(Debug, Serialize)]
pub struct GenerationBody<'a, C> {
    /// What it is about.
    #[serde(flatten)]
    pub envelope: GenerationEnvelope<'a>,
    /// The choices, in the order of their index.
    pub choices: &'a [C],
    /// What is told of the prompt of a chat.
    #[serde(flatten)]
    pub prompt: PromptReport<'a>,
    /// `None` leaves the field out, `Some(None)` sends null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// What of its form the answer need not keep to; in a stream, at its end.
    #[serde(skip_serializing_if = "<[SchemaWarning]>::is_empty")]
    pub warnings: &'a [SchemaWarning],
}

/// What is told of a prompt where that was asked for, as vLLM tells it.
#[derive(Debug, Default, Serialize)]
pub struct PromptReport<'a> {
    /// Its tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    /// How likely each of them was: null for the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<TokenLikelihoods>>>,
}

/// A JSON object from token id to how likely that token was: the one that stands in the prompt first.
#[derive(Debug, PartialEq)]
pub struct TokenLikelihoods(pub Vec<(u32, RankedToken)>);

/// How likely a token was.
#[derive(Debug, PartialEq, Serialize)]
pub struct RankedToken {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Its place among all tokens, from 1; null where it is not among those that were asked for.
    pub rank: Option<usize>,
    /// The token as text; `bytes:\x..` where it is not whole characters.
    pub decoded_token: String,
}

impl Serialize for TokenLikelihoods {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, ranked)| (token, ranked)))
    }
}

/// A whole choice of a chat.
#[derive(Debug, Serialize)]
pub struct ChatChoice<'a> {
    /// Which of the choices asked for (`n` for each prompt), counted from 0.
    pub index: usize,
    /// What the assistant said.
    pub message: AssistantMessage<'a>,
    /// Null unless asked for.
    pub logprobs: Option<ChatLogprobs<'a>>,
    /// Always set.
    pub finish_reason: FinishReason,
    /// Its tokens, those of a stop string too; absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The assistant's message.
#[derive(Debug, Serialize)]
pub struct AssistantMessage<'a> {
    /// `assistant`.
    pub role: &'static str,
    /// Its text; null where it does nothing but call tools.
    pub content: Option<&'a str>,
    /// Part of OpenAI's shape; never used here.
    pub refusal: Option<&'a str>,
    /// What the model thought before it; absent where it did not, or that is not told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// Tools that it calls; absent where it calls none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall<'a>>,
}

/// A call of a tool, or a part of one.
#[derive(Debug, Serialize)]
pub struct ToolCall<'a> {
    /// Which call of the answer, counted from 0; in streams alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
    /// Its number, by which its result is told; in its first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    /// `function` or `custom`, in its first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    /// The function that is called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<Function<'a>>,
    /// The custom tool that is called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<CustomCall<'a>>,
}

impl<'a> ToolCall<'a> {
    /// A call, or a part of one, as OpenAI tells it; `begun` is its number and what it calls.
    #[must_use]
    pub fn of(kind: CallKind, begun: Option<(&'a str, &'a str)>, text: &'a str) -> Self {
        let (id, name) = begun.unzip();
        let (word, function, custom) = match kind {
            CallKind::Function => ("function", Some(Function { name, arguments: text }), None),
            CallKind::Custom => ("custom", None, Some(CustomCall { name, input: text })),
        };
        Self { index: None, id, r#type: id.map(|_| word), function, custom }
    }
}

/// A function that is called.
#[derive(Debug, Serialize)]
pub struct Function<'a> {
    /// Its name, in the call's first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// A JSON text, or what it goes on with.
    pub arguments: &'a str,
}

/// A custom tool that is called.
#[derive(Debug, Serialize)]
pub struct CustomCall<'a> {
    /// Its name, in the call's first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// A text, or what it goes on with.
    pub input: &'a str,
}

/// A piece of a choice of a chat.
#[derive(Debug, Serialize)]
pub struct ChatDelta<'a> {
    /// Which of the choices asked for (`n` for each prompt), counted from 0.
    pub index: usize,
    /// What the choice has produced since the chunk before.
    pub delta: Delta<'a>,
    /// Null unless asked for.
    pub logprobs: Option<ChatLogprobs<'a>>,
    /// Null until the last piece.
    pub finish_reason: Option<FinishReason>,
    /// New tokens, those of a stop string too; absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// New text of a message.
#[derive(Debug, Default, Serialize)]
pub struct Delta<'a> {
    /// In the first piece only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// New text; absent in the last piece, and null in the first one of an answer that may call tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<Option<&'a str>>,
    /// More of what the model thinks before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// New parts of calls of tools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall<'a>>,
}

/// A choice, or a piece of one, of a completion.
#[derive(Debug, Serialize)]
pub struct TextChoice<'a> {
    /// Which of the choices asked for (`n` for each prompt), counted from 0.
    pub index: usize,
    /// Text, or new text.
    pub text: &'a str,
    /// Null unless asked for.
    pub logprobs: Option<TextLogprobs>,
    /// Null until the last piece.
    pub finish_reason: Option<FinishReason>,
    /// Tokens, or new tokens, those of a stop string too; absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// What is told of the prompt.
    #[serde(flatten)]
    pub prompt: PromptReport<'a>,
}

/// A piece of a choice with nothing new in it, but with what is told of drafts: whoever does not know the field reads on.
#[derive(Debug, Serialize)]
pub struct DraftEvent<'a, C> {
    /// The piece.
    #[serde(flatten)]
    pub choice: C,
    /// What is told.
    #[serde(flatten)]
    pub draft: DraftUpdate<'a>,
}

/// What a stream tells of drafts, each in a field of its own.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftUpdate<'a> {
    /// The text may go on with this; the next piece or the next retraction says whether it does.
    Provisional {
        /// Behind all text so far.
        text: &'a str,
    },
    /// It does not go on with all of that.
    Retract {
        /// So many of its last characters are to be taken back.
        characters: usize,
    },
}

/// Log-probabilities in the chat shape.
#[derive(Debug, PartialEq, Serialize)]
pub struct ChatLogprobs<'a> {
    /// One entry for each token.
    pub content: Vec<TokenLogprob<'a>>,
}

/// A token of [`ChatLogprobs`].
#[derive(Debug, PartialEq, Serialize)]
pub struct TokenLogprob<'a> {
    /// Which token, and how likely.
    #[serde(flatten)]
    pub token: Alternative<'a>,
    /// The most likely tokens at this position.
    pub top_logprobs: Vec<Alternative<'a>>,
}

/// A token and how likely it was.
#[derive(Debug, PartialEq, Serialize)]
pub struct Alternative<'a> {
    /// As text; `bytes:\x..` where it is not whole characters.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The UTF-8 bytes it stands for, of which it may have part of a character.
    pub bytes: &'a [u8],
}

/// Log-probabilities in the shape of completions: parallel arrays.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct TextLogprobs {
    /// Where each token's text begins, in characters.
    pub text_offset: Vec<usize>,
    /// How likely each token was; null for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The tokens as text.
    pub tokens: Vec<String>,
    /// The most likely tokens at each position; null for the first token of a prompt.
    pub top_logprobs: Vec<Option<TopLogprobs>>,
}

/// A JSON object from token text to log-probability, best first.
#[derive(Debug, Default, PartialEq)]
pub struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}
