//! A split client: it owns adapters, KV cache and sampling, and rents base-layer calls from an executor.
//!
//! ```text
//! generate -> SplitModel -> model::forward::run -> RemoteLayers -> Mask -> Session -> Transport -> executor
//! ```
//!
//! # Layout
//!
//! - [`address`]: where an executor is.
//! - [`transport`]: one connection: shared memory, TLS, a Unix socket.
//! - [`session`]: what outlives connections: calls, retries, the catalog.
//! - [`masking`]: what the executor sees of activations and gradients.
//! - [`remote_layers`]: the base layers of a pass and of its reverse, by calls.
//! - [`split_model`], [`generate`]: the rest of the model, here.
//! - [`speculative`]: tokens guessed here, to be verified together.
//! - [`base`]: what a client needs of the base besides linear layers, fetched once.
//! - [`text`]: tokenizer and chat template.
//! - [`secrets`]: keys, and what keeps them here.
//! - `rows`: activations on their way; [`error`]: why a connection or a call fails.
//! - [`cli`]: the command `holobiont-client`.
//! - `failpoints`: where tests may interfere.
//!
//! # Principles
//!
//! - Adapters, keys and values never leave the process; activations and gradients do, as the masking mode says.
//! - A call is pure: repeating it is always safe, and it is repeated until it is answered or patience ends.
//! - Nothing the executor sends is believed before it is checked, and nothing it does ends in a panic.
//! - There is no fallback: another base, a missing path, a lost executor are errors with names.

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
