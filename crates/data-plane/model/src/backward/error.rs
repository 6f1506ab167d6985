//! Why a batch was not learned from.

use std::io;

use super::ordered_reduction::UpstreamFailed;

/// Why a batch was not learned from.
#[derive(Debug, thiserror::Error)]
pub enum TrainError<E> {
    /// The linear layers were not evaluated.
    #[error(transparent)]
    Base(E),
    /// There is no memory for the keys and values of a batch.
    #[error("no memory for the keys and values of a batch: make batches smaller")]
    NoMemory(#[source] io::Error),
    /// A batch before it was not learned from either; why, that one's error says.
    #[error("a batch before this one was not learned from")]
    Halted,
}

impl<E> From<UpstreamFailed> for TrainError<E> {
    fn from(UpstreamFailed: UpstreamFailed) -> Self {
        Self::Halted
    }
}
