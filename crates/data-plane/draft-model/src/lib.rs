//! Drafters that need a model: a smaller one, or the base's first layers with a draft adapter.
//!
//! ```text
//! load::by_model(PATH) ----\
//!                           > Drafter: one model, several sequences --text()--> ModelDraft: one sequence
//! load::by_itself(adapter) /
//! ```
//!
//! # Layout
//!
//! - [`load`]: opens a model, or the first layers of a base, as a drafter.
//! - [`drafter`]: the model that several sequences share.
//! - `kv_slots`: the KV cache of these sequences.
//! - `vocabulary`: maps between token ids of the base and of the model.
//! - [`draft`]: the draft tokens of one sequence, with calibrated acceptance probabilities.
//!
//! # Principles
//!
//! - One pass computes the prefetched predictions of several sequences, with the same results as alone.
//! - A drafter owns threads, scratch buffers and KV cache, so a thread that waits for a pass may use it.
//! - An open drafter reads no disk and allocates no memory.
//! - No adapter of a tenant is part of a drafter.

#![forbid(unsafe_code)]

pub mod draft;
pub mod drafter;
mod kv_slots;
pub mod load;
mod vocabulary;
