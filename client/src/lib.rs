//! A split client: adapters, KV cache and sampling are local, and an executor computes linear layers.
//!
//! ```text
//! generate -> SplitModel -> model::forward::run -> RemoteLayers -> Mask -> Session -> Transport -> executor
//! ```
//!
//! # Layout
//!
//! - [`address`]: addresses of executors.
//! - [`transport`]: one connection, over shared memory, TLS or a Unix socket.
//! - [`session`]: sessions, which outlive connections: calls, retries, the catalog.
//! - [`masking`]: protection of activations and gradients from the executor.
//! - [`remote_layers`]: the linear layers of forward and backward passes, by calls.
//! - [`split_model`], [`generate`]: the local part of the model.
//! - [`speculative`]: drafting on the client, and the choice of what to verify.
//! - [`base`]: the client weights, fetched once.
//! - [`text`]: tokenizer and chat template.
//! - [`secrets`]: keys, and protection of this process's memory.
//! - `rows`: rows on the wire; [`error`]: errors of connections and calls.
//! - [`cli`]: the command `holobiont-client`.
//! - `failpoints`: failpoints for tests.
//!
//! # Principles
//!
//! - Adapters, keys and values never leave the process; masking modes protect activations and gradients.
//! - A call has no side effects, so a retry is always safe. The client retries until it gets an answer or
//!   `patience` ends.
//! - Data from the executor are checked before use, and no executor can cause a panic.
//! - There is no fallback: another base, a missing path and a lost executor are errors with names.

#![forbid(unsafe_code)]

pub mod address;
pub mod base;
pub mod cli;
pub mod error;
mod failpoints;
pub mod generate;
pub mod masking;
pub mod remote_layers;
mod rows;
pub mod secrets;
pub mod session;
pub mod speculative;
pub mod split_model;
pub mod text;
pub mod transport;

pub use self::failpoints::{FAILPOINTS, PAD_FAILPOINTS};
