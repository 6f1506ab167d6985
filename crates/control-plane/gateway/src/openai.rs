//! OpenAI's HTTP API: reads the requests and writes the answers.
//!
//! # Modules
//!
//! - [`strict_fields`]: reads a JSON body field by field; fields left over are refused by name.
//! - [`request_context`], [`target`]: the caller, the default seed and the model that a request means.
//! - [`named_uris`]: adapters that a request names by URI.
//! - [`adapter_switches`]: other adapters for later stages of an answer; [`adapter_stages`]: the tokens that
//!   each stage generated. [`namespace`]: which requests share cached prefixes.
//! - [`params`]: the sampling and output options that chat and completions share; `stops`: the stop strings;
//!   [`stream_options`]: the options of a stream.
//! - [`structured`]: structured output. [`tools`]: tool calls. [`reasoning`]: reasoning content before the
//!   answer.
//! - [`messages`]: the messages of a conversation; [`template_options`]: the options of the chat template.
//! - [`chat`], [`completions`], [`responses`]: the routes of generation, each read into a
//!   [`GenerationRequest`](generation_request::GenerationRequest); [`chat_request`]: the request that all
//!   routes with messages share.
//! - [`pooling`]: vectors of prompts, computed as generation requests without output tokens; [`embeddings`],
//!   [`scoring`]: the routes that return such vectors, or scores that follow from them.
//! - [`classify`]: the classes of texts, by an adapter's classification head or by given tokens.
//! - [`generation_request`]: checks prompts and options and turns them into sequences.
//! - [`sequence_group`]: the sequences of a request, resumed when their executor is lost.
//! - [`generation_response`]: the updates of each choice of a running request, and its usage.
//! - [`choice`]: turns tokens of one sequence into text, log-probabilities and a finish reason.
//! - [`echo`], [`logprobs`]: the echoed prompt, and log-probabilities in OpenAI's two formats.
//! - [`sse`]: streams an answer in any API's format; [`stream`], [`collect`]: chat and completions as a
//!   stream or one body.
//! - [`answer_record`]: what a receipt says of an answer; [`receipts`]: the verification by a replay.
//! - [`types`]: the bodies of answers.
//! - [`models`], [`tokens`], [`adapters`], [`adapter_files`], [`upload`], [`push`]: the routes beside
//!   generation; [`load_request`]: the body of a load. `idempotency`: the header `Idempotency-Key`.
//! - [`files`], [`fine_tuning`], [`fine_tuning_request`]: the routes of training; [`batches`]: files of
//!   requests that are answered in the background; `creation`: runs a creation to its end; [`paging`]: pages
//!   of lists.
//! - [`errors`]: the one body of all errors.

pub(crate) mod adapter_files;
pub(crate) mod adapter_stages;
pub mod adapter_switches;
pub mod adapters;
pub(crate) mod answer_record;
pub(crate) mod batches;
pub mod chat;
pub mod chat_request;
pub mod choice;
pub mod classify;
pub(crate) mod collect;
pub mod completions;
mod creation;
pub(crate) mod echo;
pub mod embeddings;
pub(crate) mod files;
pub(crate) mod fine_tuning;
pub mod fine_tuning_request;
pub mod generation_request;
pub(crate) mod generation_response;
mod idempotency;
pub mod load_request;
pub mod logprobs;
pub(crate) mod messages;
pub(crate) mod models;
pub mod named_uris;
pub mod namespace;
pub(crate) mod paging;
pub mod params;
pub(crate) mod pooling;
pub(crate) mod push;
pub mod reasoning;
pub mod receipts;
pub mod request_context;
pub mod responses;
pub mod scoring;
pub(crate) mod sequence_group;
pub mod sse;
pub(crate) mod stops;
pub(crate) mod stream;
pub mod stream_options;
pub mod strict_fields;
pub mod structured;
pub mod target;
pub(crate) mod template_options;
pub mod tokens;
pub mod tools;
pub mod types;
pub(crate) mod upload;

pub use crate::errors;
