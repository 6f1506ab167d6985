//! OpenAI's HTTP API: what requests may say, and what answers look like.
//!
//! # Where things are
//!
//! - [`strict_fields`]: a JSON body, read field by field; what is left over is refused by name.
//! - [`request_context`], [`target`]: who asks, with which seed, and which model is meant.
//! - [`params`]: the sampling and output options that chat and completions share; `stops`: what ends a text; [`stream_options`]: how an answer
//!   travels.
//! - [`structured`]: what an answer has to look like. [`tools`]: functions that it may call. [`reasoning`]: what a model thinks before
//!   it. [`messages`]: a conversation;
//!   [`template_options`]: how a model is shown it.
//! - [`chat`], [`completions`], [`responses`]: the ways to ask, each turned into a [`GenerationRequest`](generation_request::GenerationRequest); [`chat_request`] is what all that
//!   are about messages become first.
//! - [`embeddings`]: texts as vectors, which are jobs too.
//! - [`generation_request`]: prompts and options, checked; turned into sequences.
//! - [`sequence_group`]: the sequences of a job, redone when the executor is lost.
//! - [`generation_response`]: a running job: what each step adds to which choice, and what it all used.
//! - [`choice`]: tokens of one sequence into text, log-probabilities and a finish reason.
//! - [`echo`], [`logprobs`]: the prompt repeated, and probabilities in OpenAI's two shapes.
//! - [`sse`]: the answer as it comes, in somebody's shape; [`stream`], [`collect`]: in that of chat and completions, as it comes or as one
//!   body.
//! - [`types`]: the bodies that are sent.
//! - [`models`], [`tokens`], [`adapters`], [`upload`]: the routes that are not about generation.
//! - [`files`], [`fine_tuning`], [`fine_tuning_request`]: those about training; [`paging`]: their lists in pieces.
//! - [`errors`]: the one shape every failure has.

pub mod adapter_files;
pub mod adapters;
pub mod chat;
pub mod chat_request;
pub mod choice;
pub mod collect;
pub mod completions;
pub mod echo;
pub mod embeddings;
pub mod files;
pub mod fine_tuning;
pub mod fine_tuning_request;
pub mod generation_request;
pub mod generation_response;
mod idempotency;
pub mod logprobs;
pub mod messages;
pub mod models;
#[cfg(test)]
mod openapi_test;
pub mod paging;
pub mod params;
pub mod reasoning;
pub mod request_context;
pub mod responses;
pub mod sequence_group;
pub mod sse;
mod stops;
pub mod stream;
pub mod stream_options;
pub mod strict_fields;
pub mod structured;
pub mod target;
pub mod template_options;
pub mod tokens;
pub mod tools;
pub mod types;
pub mod upload;

pub use crate::errors;
