//! Tinker's HTTP API, whose client is the package `tinker`, unmodified: what requests may say, and what answers look like.
//!
//! - [`sessions`]: who is there, and what they wait for.
//! - [`training`]: models, and what is done with them.
//! - [`sampling`]: what is sampled from them; `sampled` is what comes of it.
//! - [`checkpoints`]: what is kept of them; [`downloads`]: addresses to take it away from.

pub mod checkpoints;
pub mod downloads;
mod sampled;
pub mod sampling;
pub mod sessions;
pub mod training;
