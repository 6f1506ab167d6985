//! The record of an answer: everything that determines its tokens, and the tokens.

use serde::{Deserialize, Serialize};

use crate::hex::Hash;

/// Format of receipts; changes with every field of a record.
pub const RECEIPT_FORMAT: u32 = 1;

/// Everything that determines an answer, and the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswerRecord {
    /// [`RECEIPT_FORMAT`] of the record.
    pub format: u32,
    /// Version of the program that gave the answer; for information.
    pub program: String,
    /// Model as the request named it.
    pub model: String,
    /// Content hash of the base: configuration, tensors, tokenizer and chat template.
    pub base: Hash,
    /// Numeric settings of the executor and the request.
    pub settings: NumericSettings,
    /// Content hash of the adapter version; null for the base.
    pub adapter: Option<Hash>,
    /// Parameters of token sampling.
    pub sampler: Sampler,
    /// Conditions under which the answer ends.
    pub limits: AnswerLimits,
    /// Grammar of structured output; null without one.
    pub constraint: Option<Constraint>,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Token ids of the answer, the stop token included.
    pub answer: Vec<u32>,
    /// Why the answer ended.
    pub ended: AnswerEnd,
}

/// Numeric settings that determine the bits of logits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericSettings {
    /// Kind of the device; only `cpu` so far.
    pub device: String,
    /// Precision of activations, KV cache and adapters, and the revision of the arithmetic, in the words of
    /// the executor.
    pub numbers: String,
    /// Requested precision: `serving` or `exact`.
    pub precision: String,
}

/// Parameters of token sampling, by value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sampler {
    /// Temperature; 0 is greedy.
    pub temperature: f32,
    /// Number of most likely tokens to keep; 0 keeps all tokens.
    pub top_k: u32,
    /// Probability mass to keep.
    pub top_p: f32,
    /// Minimum probability relative to the most likely token.
    pub min_p: f32,
    /// Subtracted once from the logit of a generated token.
    pub presence_penalty: f32,
    /// Subtracted for each earlier occurrence in the answer.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of seen tokens.
    pub repetition_penalty: f32,
    /// Tokens, and the values added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the generator, which is keyed by seed and position. Text, because many JSON parsers round
    /// numbers above 2^53.
    #[serde(with = "seed_text")]
    pub seed: u64,
}

/// Conditions under which an answer ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswerLimits {
    /// Number of tokens after which the answer ends: the requested maximum, or less if the context ends
    /// before.
    pub max_tokens: u32,
    /// Number of tokens before which no stop token is sampled.
    pub min_tokens: u32,
    /// Tokens that end the answer, the model's own end tokens included.
    pub stop_tokens: Vec<u32>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// How tokens become the text in which stop strings are searched.
    pub text: TextDecoding,
}

/// How tokens become text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextDecoding {
    /// Whether the text continues the prompt.
    pub start: DecodingStart,
    /// Special tokens that become text.
    pub shown: Vec<String>,
}

/// Whether an answer is a text of its own or continues the text of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecodingStart {
    /// The answer is a separate text.
    Beginning,
    /// The answer continues the prompt.
    Continuation,
}

/// Grammar of a structured output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constraint {
    /// BLAKE3 hash of `source`.
    pub hash: Hash,
    /// Text of the grammar, as executors take it.
    pub source: String,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerEnd {
    /// The last token is a stop token.
    StopToken,
    /// The last token completed a stop string.
    StopString,
    /// The answer has `max_tokens` tokens.
    Length,
}

impl Constraint {
    /// Returns the constraint of a grammar with its hash.
    #[must_use]
    pub fn of(source: &str) -> Self {
        Self { hash: Hash(*blake3::hash(source.as_bytes()).as_bytes()), source: source.to_owned() }
    }
}

impl AnswerEnd {
    /// Returns the name that JSON has.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::StopToken => "stop_token",
            Self::StopString => "stop_string",
            Self::Length => "length",
        }
    }
}

/// Writes a seed as decimal digits.
mod seed_text {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(seed: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(seed)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
