//! Why the executor did not do what it was asked.

use shmproto::message::WireError;

use super::concurrency_limit::TooManySequences;

/// Why the executor did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No executor is connected, or the connection broke before the answer came.
    #[error(
        "the base-executor is not reachable ({0}); it is reconnected to automatically, try again shortly"
    )]
    Unavailable(String),
    /// An adapter's files did not get to an executor on another host.
    #[error("the adapter's files could not be brought to the base-executor: {0}")]
    NotLent(String),
    /// It answered with a typed error.
    #[error("{}", .0.message)]
    Refused(WireError),
    /// As many sequences or calls are under way as the executor takes. Said at once, without asking it.
    #[error(
        "{limit} {what} are under way, which is all the base-executor takes; try again when some have ended"
    )]
    Busy {
        /// The limit that was met.
        limit: usize,
        /// What is limited.
        what: &'static str,
        /// How long a new one would wait, rounded up.
        wait_s: u32,
    },
}

impl From<TooManySequences> for CallError {
    fn from(TooManySequences { limit }: TooManySequences) -> Self {
        Self::Busy { limit, what: "sequences", wait_s: 1 }
    }
}
