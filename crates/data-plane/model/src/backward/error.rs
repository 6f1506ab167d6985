//! Reasons why a batch was not learned from.

use std::io;

use super::ordered_reduction::UpstreamFailed;

/// Reasons why a batch was not learned from.
#[derive(Debug, thiserror::Error)]
pub enum TrainError<E> {
    /// The linear layers were not evaluated.
    #[error(transparent)]
    Base(E),
    /// There is no memory for a batch's keys and values.
    #[error("no memory for the KV cache of a batch; use smaller batches")]
    NoMemory(#[source] io::Error),
    /// An earlier batch failed; its own error gives the reason.
    #[error("the previous batch has no backward pass yet")]
    Halted,
}

impl<E> From<UpstreamFailed> for TrainError<E> {
    fn from(UpstreamFailed: UpstreamFailed) -> Self {
        Self::Halted
    }
}
