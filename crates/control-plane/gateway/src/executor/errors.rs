//! Error of a call to the executor.

use shmproto::message::WireError;

use super::concurrency_limit::TooManySequences;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No executor is connected, or the connection broke before the answer arrived.
    #[error(
        "the base-executor is not reachable ({0}); the gateway reconnects automatically, so try again shortly"
    )]
    Unavailable(String),
    #[error("cannot send the adapter's files to the base-executor: {0}")]
    NotLent(String),
    #[error("{}", .0.message)]
    Refused(WireError),
    /// The limit on concurrent sequences or calls is reached. The executor was not asked.
    #[error("{limit} {what} are running, which is the base-executor's limit; try again when some have ended")]
    Busy {
        limit: usize,
        /// Limited quantity: `sequences` or `calls`.
        what: &'static str,
        /// Expected wait of a new request in seconds, rounded up.
        wait_s: u32,
    },
}

impl From<TooManySequences> for CallError {
    fn from(TooManySequences { limit }: TooManySequences) -> Self {
        Self::Busy { limit, what: "sequences", wait_s: 1 }
    }
}
