//! Reverse pass: gradients of an adapter over frozen linear layers that keep no state between calls.
//!
//! A [`Trainer`] runs the forward pass on the serving path, and a [`Tape`] records the saved activations. The
//! reverse pass computes everything but the frozen linear layers, whose products `g W` come from
//! [`ReverseLayers`](crate::forward::ReverseLayers).
//!
//! # Layout
//!
//! - [`trainer`]: both passes over whole batches.
//! - [`saved_activations`]: values kept from the forward pass for the reverse pass.
//! - `reverse`: the reverse pass through the blocks.
//! - `experts`: the reverse pass through mixtures of experts.
//! - `head`: logits, log-probabilities, and the reverse pass from them.
//! - `deltas`: the reverse pass through the deltas of a linear group.
//! - `pass`: state that `reverse`, `head` and `deltas` share.
//! - `trainable_site`: the adapter matrices that learn at one place.
//! - [`dropout`]: inputs that dropout withholds from matrices.
//! - [`gradients`]: gradient sums of an adapter's values.
//! - [`ordered_reduction`]: the order in which concurrent batches add to the gradients.
//! - [`error`]: reasons why a batch was not learned from.
//!
//! # Principles
//!
//! - **Serving bits**: log-probabilities equal those that an engine with the same adapter reports.
//! - **Sums in sequence order**: the split into batches, the number of concurrent batches and the number of
//!   threads change no bit of a gradient ([`kernels::backward`]).
//! - Values that are not saved are computed again to the same bits: [`SavedScope`] trades memory for time.

mod deltas;
pub mod dropout;
pub mod error;
mod experts;
pub mod gradients;
mod head;
pub mod ordered_reduction;
mod pass;
mod reverse;
pub mod saved_activations;
mod trainable_site;
pub mod trainer;

pub use self::{
    dropout::Dropout,
    error::TrainError,
    gradients::Gradients,
    head::{Loss, Prediction},
    ordered_reduction::{ReductionQueue, ReductionTurn},
    saved_activations::{SavedScope, Tape},
    trainer::{Example, TrainableAdapter, Trainer},
};
