//! Gradients of what a client of base layers computes itself: norms, rotary embedding, gating, attention, low-rank
//! deltas, log-probabilities. Those of the frozen linear layers are [`linear_transposed`](crate::linear_transposed).
//!
//! All numbers are 32 bits and sums too. As forwards, an element's bits depend on its own row or sequence alone: never on the
//! batch or on the number of threads. Gradients of weights are sums over rows: [`SUM_ROWS`] rows of a sequence make a sum
//! from zero, and these are added up in the order of the rows, so that the bits depend on the order of sequences alone,
//! not on how they were cut into batches.
//!
//! # Layout
//!
//! - [`elementwise`]: norms, rotation, gating. [`attention`]: of whole sequences. [`lora`]: low-rank deltas. [`softmax`]:
//!   log-probabilities of a vocabulary.
//! - `product`: products of small matrices, which all of them are made of.

pub mod attention;
pub mod elementwise;
pub mod lora;
mod product;
pub mod softmax;

/// Rows of a sequence that make one sum.
pub const SUM_ROWS: usize = 64;
