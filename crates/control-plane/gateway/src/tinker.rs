//! Tinker's HTTP API, which the unmodified package `tinker` calls.
//!
//! - [`sessions`]: sessions and futures of clients.
//! - [`training`]: models in training, and the operations on them.
//! - [`sampling`]: sampling from models; `sampled`: the results.
//! - [`checkpoints`]: saved checkpoints; [`downloads`]: addresses for their download.

pub(crate) mod checkpoints;
pub(crate) mod downloads;
mod sampled;
pub(crate) mod sampling;
pub mod sessions;
pub mod training;
