//! Gradients of the layers that a split client computes itself: norms, rotary embedding, gating, attention,
//! low-rank deltas, log-probabilities. Gradients of the frozen linear layers are in
//! [`linear_transposed`](crate::linear_transposed).
//!
//! All values and sums have 32 bits, but with keys and values in bf16 the factors of attention's products are
//! rounded to bf16. As in the forward pass, an element's bits depend on its own row or
//! sequence alone, never on the batch or the number of threads. Gradients of weights are sums over rows:
//! [`SUM_ROWS`] rows of a sequence form a sum from zero, and these sums are added in the order of the rows.
//! The bits therefore depend on the order of sequences alone, not on their division into batches.
//!
//! # Layout
//!
//! - [`elementwise`]: gradients of norms, rotation and gating.
//! - [`attention`]: gradients of attention over whole sequences.
//! - [`lora`]: gradients of low-rank deltas.
//! - [`softmax`]: gradients of log-probabilities over a vocabulary.
//! - `product`: products of small matrices, which all other modules use.

pub mod attention;
pub mod elementwise;
pub mod lora;
mod product;
pub mod softmax;

/// Rows of a sequence per partial sum.
pub const SUM_ROWS: usize = 64;
