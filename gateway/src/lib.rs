//! The process that owns text: OpenAI's HTTP API in front of a base-executor.
//!
//! # Layout
//!
//! - [`config`], [`server`]: arguments checked, everything put together, served and shut down.
//! - [`routes`]: the one table of what is served and who may use it; [`auth`] enforces it.
//! - [`openai`]: requests checked, answers shaped.
//! - [`text`]: tokenizer and chat template.
//! - [`executor`]: the connection over which token ids travel; [`lifecycle`] says when it can be used.
//! - [`adapters`]: names, generations, and what is on disk about them.
//! - [`metrics`]: figures for Prometheus.
//!
//! # Principles
//!
//! - Tensors never come here: text in, token ids out, token ids back, text out.
//! - Refuse by name, never degrade in silence: an option not honoured is an error that names it.
//! - A stream ends in finish reasons and `[DONE]`, or in one error event.
//! - Whoever goes away is cancelled; whatever the executor loses is redone or ends in one typed error.
//! - Everything that can grow has a limit, and a full limit is an answer.

#![forbid(unsafe_code)]

pub mod adapters;
pub mod app;
pub mod auth;
pub mod config;
pub mod executor;
pub mod lifecycle;
pub mod metrics;
pub mod openai;
pub mod routes;
pub mod server;
pub mod text;

use std::time::{SystemTime, UNIX_EPOCH};

/// Now, as OpenAI's `created` fields count it.
#[must_use]
pub fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
