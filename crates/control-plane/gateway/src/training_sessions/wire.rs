//! Protobuf messages of Tinker (package `tinker_public`), as far as this gateway uses them. Tensors are raw
//! little-endian bytes.

use std::collections::HashMap;

/// Dtype of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum DType {
    Unspecified = 0,
    Float32 = 1,
    Int64 = 2,
    Int32 = 3,
    Bfloat16 = 4,
}

/// Request to evaluate sequences with a loss, with or without gradients.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ForwardBackwardRequest {
    #[prost(string, tag = "1")]
    pub model_id: String,
    /// Number of the request within its model.
    #[prost(int32, tag = "2")]
    pub seq_id: i32,
    #[prost(message, repeated, tag = "3")]
    pub data: Vec<Datum>,
    /// Name of the loss.
    #[prost(string, tag = "4")]
    pub loss_fn: String,
    /// Options of the loss, as older clients send them.
    #[prost(map = "string, double", tag = "5")]
    pub loss_fn_config: HashMap<String, f64>,
    /// Whether gradients are skipped.
    #[prost(bool, tag = "6")]
    pub forward_only: bool,
    /// Options of the loss; these take precedence over `loss_fn_config`.
    #[prost(map = "string, message", tag = "7")]
    pub loss_fn_config_v2: HashMap<String, LossConfigValue>,
}

/// Model and number of a [`ForwardBackwardRequest`], decoded without the rest.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RequestAddress {
    #[prost(string, tag = "1")]
    pub model_id: String,
    /// Number of the request within its model.
    #[prost(int32, tag = "2")]
    pub seq_id: i32,
}

/// Value of a loss option.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LossConfigValue {
    /// Number or text, if set.
    #[prost(oneof = "LossConfig", tags = "1, 2")]
    pub value: Option<LossConfig>,
}

/// A number or a text.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum LossConfig {
    #[prost(double, tag = "1")]
    Number(f64),
    #[prost(string, tag = "2")]
    Text(String),
}

/// A sequence with the inputs of its loss.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Datum {
    /// Tokens of the sequence, in chunks.
    #[prost(message, repeated, tag = "1")]
    pub model_input: Vec<ModelInputChunk>,
    /// Input tensors by name.
    #[prost(map = "string, message", tag = "2")]
    pub loss_fn_inputs: HashMap<String, TensorData>,
}

/// Part of a sequence.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ModelInputChunk {
    /// Content of the chunk, if it is known.
    #[prost(oneof = "ChunkKind", tags = "1, 2, 3")]
    pub kind: Option<ChunkKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum ChunkKind {
    #[prost(message, tag = "1")]
    EncodedText(EncodedText),
    /// An image, which is not supported.
    #[prost(message, tag = "2")]
    Image(IgnoredMessage),
    /// Audio, which is not supported.
    #[prost(message, tag = "3")]
    Dmel(IgnoredMessage),
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct EncodedText {
    /// Token ids as 32-bit integers.
    #[prost(bytes = "vec", tag = "1")]
    pub tokens: Vec<u8>,
}

/// Message whose content is skipped.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct IgnoredMessage {}

/// Values with dtype and shape.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorData {
    #[prost(oneof = "Values", tags = "1, 2")]
    pub values: Option<Values>,
    /// Dtype of the values ([`DType`]).
    #[prost(enumeration = "DType", tag = "3")]
    pub dtype: i32,
    /// Shape; empty for one dimension.
    #[prost(int64, repeated, tag = "4")]
    pub shape: Vec<i64>,
}

/// Values of a tensor.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Values {
    /// Every value, in row-major order.
    #[prost(bytes, tag = "1")]
    Dense(Vec<u8>),
    /// Nonzero values only, which is not supported.
    #[prost(message, tag = "2")]
    SparseCsr(SparseCsr),
}

/// Sparse matrix in compressed row format.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SparseCsr {
    /// Stored values of the matrix.
    #[prost(bytes = "vec", tag = "1")]
    pub values: Vec<u8>,
    /// Index of the first value of each row, in 64-bit integers.
    #[prost(bytes = "vec", tag = "2")]
    pub crow_indices: Vec<u8>,
    /// Column of each value, in 64-bit integers.
    #[prost(bytes = "vec", tag = "3")]
    pub col_indices: Vec<u8>,
}

/// Result of a [`ForwardBackwardRequest`].
#[derive(Clone, PartialEq, prost::Message)]
pub struct ForwardBackwardOutput {
    /// Always `ArrayRecord` in this gateway.
    #[prost(string, tag = "1")]
    pub loss_fn_output_type: String,
    /// Arrays of all sequences.
    #[prost(message, repeated, tag = "2")]
    pub loss_fn_outputs: Vec<ArrayRecord>,
    /// Metrics, from `name:reduction` to value.
    #[prost(map = "string, double", tag = "3")]
    pub metrics: HashMap<String, f64>,
}

/// Arrays of several sequences.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ArrayRecord {
    /// Always empty in this gateway.
    #[prost(string, tag = "1")]
    pub type_tag: String,
    #[prost(map = "string, message", tag = "2")]
    pub fields: HashMap<String, BatchedTensor>,
    /// Number of sequences in the arrays.
    #[prost(int64, tag = "3")]
    pub num_datums: i64,
}

/// One array per sequence, concatenated.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BatchedTensor {
    /// Values of all arrays.
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
    /// Byte offset of each array and the end of the last one, in 64-bit integers.
    #[prost(bytes = "vec", tag = "2")]
    pub offsets: Vec<u8>,
    /// Dtype of the values ([`DType`]).
    #[prost(enumeration = "DType", tag = "3")]
    pub dtype: i32,
    /// All dimensions but the first.
    #[prost(int64, repeated, tag = "4")]
    pub trailing_shape: Vec<i64>,
}

/// Result of a sampling request.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SampleResponse {
    /// One sequence per requested sample.
    #[prost(message, repeated, tag = "1")]
    pub sequences: Vec<SampledSequence>,
    /// Log-probabilities of the prompt tokens as 32-bit floats, NaN for none.
    #[prost(bytes = "vec", optional, tag = "2")]
    pub prompt_logprobs: Option<Vec<u8>>,
    /// Most likely tokens at each position of the prompt.
    #[prost(message, optional, tag = "3")]
    pub topk_prompt_logprobs: Option<TopkLogprobs>,
    /// Prompt tokens served from the prefix cache.
    #[prost(int32, tag = "4")]
    pub prompt_cache_hit_tokens: i32,
}

/// A completion of the prompt.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SampledSequence {
    /// Reason of the end ([`StopReason`]).
    #[prost(enumeration = "StopReason", tag = "1")]
    pub stop_reason: i32,
    /// Sampled tokens as 32-bit integers.
    #[prost(bytes = "vec", tag = "2")]
    pub tokens: Vec<u8>,
    /// Log-probabilities of the tokens as 32-bit floats.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub logprobs: Option<Vec<u8>>,
    /// Most likely tokens at each position.
    #[prost(message, optional, tag = "4")]
    pub topk_sampled_logprobs: Option<TopkLogprobs>,
}

/// Reason why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum StopReason {
    /// A stop token or a stop string.
    Stop = 0,
    /// The maximum number of tokens.
    Length = 1,
}

/// The `k` most likely tokens at each of `length` positions.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TopkLogprobs {
    /// Token ids `[length, k]` as 32-bit integers; 0 for none.
    #[prost(bytes = "vec", tag = "1")]
    pub token_ids: Vec<u8>,
    /// Log-probabilities `[length, k]` as 32-bit floats; [`NO_LOGPROB`] for none.
    #[prost(bytes = "vec", tag = "2")]
    pub logprobs: Vec<u8>,
    /// Number of tokens per position.
    #[prost(uint32, tag = "3")]
    pub k: u32,
    #[prost(uint32, tag = "4")]
    pub length: u32,
}

/// Log-probability of a missing token.
pub(crate) const NO_LOGPROB: f32 = -99_999.0;
