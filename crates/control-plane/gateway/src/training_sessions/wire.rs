//! Tinker's messages in protobuf (package `tinker_public`), as far as they are read or written here. Tensors are raw bytes,
//! little-endian.

use std::collections::HashMap;

/// What numbers a tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum DType {
    /// Nobody said.
    Unspecified = 0,
    /// Floats of 32 bits.
    Float32 = 1,
    /// Integers of 64 bits.
    Int64 = 2,
    /// Integers of 32 bits.
    Int32 = 3,
    /// The upper half of floats.
    Bfloat16 = 4,
}

/// Data, and what to evaluate of them.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ForwardBackwardRequest {
    /// Of which model.
    #[prost(string, tag = "1")]
    pub model_id: String,
    /// When, among the requests of this model.
    #[prost(int32, tag = "2")]
    pub seq_id: i32,
    /// Sequences.
    #[prost(message, repeated, tag = "3")]
    pub data: Vec<Datum>,
    /// The loss' name.
    #[prost(string, tag = "4")]
    pub loss_fn: String,
    /// Its options, as older clients send them.
    #[prost(map = "string, double", tag = "5")]
    pub loss_fn_config: HashMap<String, f64>,
    /// Without gradients.
    #[prost(bool, tag = "6")]
    pub forward_only: bool,
    /// Its options; these count if there are any.
    #[prost(map = "string, message", tag = "7")]
    pub loss_fn_config_v2: HashMap<String, LossConfigValue>,
}

/// Of a [`ForwardBackwardRequest`] whose it is, and when its turn is.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RequestAddress {
    /// Of which model.
    #[prost(string, tag = "1")]
    pub model_id: String,
    /// When, among the requests of this model.
    #[prost(int32, tag = "2")]
    pub seq_id: i32,
}

/// An option's value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LossConfigValue {
    /// Of either kind.
    #[prost(oneof = "LossConfig", tags = "1, 2")]
    pub value: Option<LossConfig>,
}

/// A number or a word.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum LossConfig {
    /// A number.
    #[prost(double, tag = "1")]
    Number(f64),
    /// A word.
    #[prost(string, tag = "2")]
    Text(String),
}

/// A sequence with what its loss needs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Datum {
    /// Its tokens, in pieces.
    #[prost(message, repeated, tag = "1")]
    pub model_input: Vec<ModelInputChunk>,
    /// A tensor for each input.
    #[prost(map = "string, message", tag = "2")]
    pub loss_fn_inputs: HashMap<String, TensorData>,
}

/// A piece of a sequence.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ModelInputChunk {
    /// Of one kind.
    #[prost(oneof = "ChunkKind", tags = "1, 2, 3")]
    pub kind: Option<ChunkKind>,
}

/// What a piece is.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum ChunkKind {
    /// Tokens.
    #[prost(message, tag = "1")]
    EncodedText(EncodedText),
    /// A picture.
    #[prost(message, tag = "2")]
    Image(IgnoredMessage),
    /// A sound.
    #[prost(message, tag = "3")]
    Dmel(IgnoredMessage),
}

/// Tokens.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EncodedText {
    /// Integers of 32 bits.
    #[prost(bytes = "vec", tag = "1")]
    pub tokens: Vec<u8>,
}

/// Something that is not looked into.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct IgnoredMessage {}

/// Numbers in a shape.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorData {
    /// Its numbers.
    #[prost(oneof = "Values", tags = "1, 2")]
    pub values: Option<Values>,
    /// Their kind.
    #[prost(enumeration = "DType", tag = "3")]
    pub dtype: i32,
    /// Its shape; empty if it has one dimension.
    #[prost(int64, repeated, tag = "4")]
    pub shape: Vec<i64>,
}

/// A tensor's numbers.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Values {
    /// All of them.
    #[prost(bytes, tag = "1")]
    Dense(Vec<u8>),
    /// Some of them.
    #[prost(message, tag = "2")]
    SparseCsr(SparseCsr),
}

/// Compressed rows.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SparseCsr {
    /// The numbers that are there.
    #[prost(bytes = "vec", tag = "1")]
    pub values: Vec<u8>,
    /// Where each row begins among them, integers of 64 bits.
    #[prost(bytes = "vec", tag = "2")]
    pub crow_indices: Vec<u8>,
    /// In which column each stands, integers of 64 bits.
    #[prost(bytes = "vec", tag = "3")]
    pub col_indices: Vec<u8>,
}

/// What data came to.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ForwardBackwardOutput {
    /// `ArrayRecord`.
    #[prost(string, tag = "1")]
    pub loss_fn_output_type: String,
    /// Arrays of all data.
    #[prost(message, repeated, tag = "2")]
    pub loss_fn_outputs: Vec<ArrayRecord>,
    /// `name:reduction` to number.
    #[prost(map = "string, double", tag = "3")]
    pub metrics: HashMap<String, f64>,
}

/// Arrays of several data.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ArrayRecord {
    /// Empty.
    #[prost(string, tag = "1")]
    pub type_tag: String,
    /// By name.
    #[prost(map = "string, message", tag = "2")]
    pub fields: HashMap<String, BatchedTensor>,
    /// Of how many.
    #[prost(int64, tag = "3")]
    pub num_datums: i64,
}

/// One array of each datum, end to end.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BatchedTensor {
    /// The numbers.
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
    /// At which byte each begins, and where the last ends: integers of 64 bits.
    #[prost(bytes = "vec", tag = "2")]
    pub offsets: Vec<u8>,
    /// What numbers they are.
    #[prost(enumeration = "DType", tag = "3")]
    pub dtype: i32,
    /// All dimensions but the first.
    #[prost(int64, repeated, tag = "4")]
    pub trailing_shape: Vec<i64>,
}

/// What was sampled.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SampleResponse {
    /// One for each that was asked for.
    #[prost(message, repeated, tag = "1")]
    pub sequences: Vec<SampledSequence>,
    /// Floats of 32 bits, NaN where there is none.
    #[prost(bytes = "vec", optional, tag = "2")]
    pub prompt_logprobs: Option<Vec<u8>>,
    /// The likeliest tokens at each place of the prompt.
    #[prost(message, optional, tag = "3")]
    pub topk_prompt_logprobs: Option<TopkLogprobs>,
    /// Tokens that were not computed again.
    #[prost(int32, tag = "4")]
    pub prompt_cache_hit_tokens: i32,
}

/// A continuation.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SampledSequence {
    /// Why it ends.
    #[prost(enumeration = "StopReason", tag = "1")]
    pub stop_reason: i32,
    /// Integers of 32 bits.
    #[prost(bytes = "vec", tag = "2")]
    pub tokens: Vec<u8>,
    /// Floats of 32 bits.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub logprobs: Option<Vec<u8>>,
    /// The likeliest tokens at each place.
    #[prost(message, optional, tag = "4")]
    pub topk_sampled_logprobs: Option<TopkLogprobs>,
}

/// Why a continuation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum StopReason {
    /// A stop token or string.
    Stop = 0,
    /// There was to be no more.
    Length = 1,
}

/// The likeliest tokens at each of `length` places.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TopkLogprobs {
    /// `[length, k]`, integers of 32 bits; 0 where there is none.
    #[prost(bytes = "vec", tag = "1")]
    pub token_ids: Vec<u8>,
    /// `[length, k]`, floats of 32 bits; [`NO_LOGPROB`] where there is none.
    #[prost(bytes = "vec", tag = "2")]
    pub logprobs: Vec<u8>,
    /// How many at each place.
    #[prost(uint32, tag = "3")]
    pub k: u32,
    /// Places.
    #[prost(uint32, tag = "4")]
    pub length: u32,
}

/// What stands where there is no log-probability.
pub const NO_LOGPROB: f32 = -99_999.0;
