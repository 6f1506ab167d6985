//! The reverse pass: gradients of an adapter, from frozen linear layers that keep nothing between two calls.
//!
//! A [`Trainer`] runs sequences forward by the one forward pass, on the path that serves, and a [`Tape`] notes what goes by.
//! On the way back it computes everything but the frozen linear layers itself; these it asks for `g W`
//! ([`ReverseLayers`](crate::forward::ReverseLayers)).
//!
//! # Layout
//!
//! - [`trainer`]: both passes, over whole batches. [`saved_activations`]: what is kept between them, and how it is noted.
//! - `reverse`: back through the blocks; `experts`: through those of mixtures. `head`: logits, log-probabilities, and back from them. `deltas`: back through a linear
//!   group. `pass`: what all three have in hand; `trainable_site`: where something learns. [`dropout`]: what matrices are not given.
//! - [`gradients`]: sums for the numbers of an adapter. [`ordered_reduction`]: how batches add to them that are under way at the same time.
//! - [`error`]: why a batch was not learned from.
//!
//! # Principles
//!
//! - **Same bits as serving**: log-probabilities are those that an engine with the same adapter reports.
//! - **Sums in the order of sequences**: how they are cut into batches, how many of these are under way at once, and by how many
//!   threads they are computed, changes no bit of a gradient ([`kernels::backward`]).
//! - What is not kept is computed once more, to the same bits: [`SavedScope`] trades memory for time and nothing else.

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
