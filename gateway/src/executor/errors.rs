//! Why the executor did not do what it was asked.

use shmproto::message::WireError;

use super::slots::NoSlot;
use crate::clock::whole_seconds;

/// Why the executor did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No executor is connected, or the connection broke before the answer came.
    #[error(
        "the base-executor is not reachable ({0}); it is reconnected to automatically, try again shortly"
    )]
    Unavailable(String),
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
    /// Requests wait for longer than they should, and have done so for some time. Said at once, without asking it.
    #[error(
        "requests have waited for longer than {target_ms} ms (--target-delay-ms) for some time; a new one would wait \
         about {wait_s} s, try again then"
    )]
    Overload {
        /// How long they may wait for long.
        target_ms: u128,
        /// How long a new request would wait, rounded up.
        wait_s: u32,
    },
    /// One request has more sequences than are ever computed or wait at a time: it would be refused for ever.
    #[error(
        "{asked} sequences are asked for at once, but the base-executor takes {limit} in all; ask for fewer"
    )]
    TooMany {
        /// Sequences of the request.
        asked: usize,
        /// Sequences there may be.
        limit: usize,
    },
}

impl From<NoSlot> for CallError {
    fn from(refused: NoSlot) -> Self {
        match refused {
            NoSlot::Full { limit, forecast } => {
                Self::Busy { limit, what: "sequences", wait_s: whole_seconds(forecast) }
            }
            NoSlot::Overload(overload) => {
                let target_ms = overload.target.as_millis();
                Self::Overload { target_ms, wait_s: whole_seconds(overload.forecast) }
            }
        }
    }
}
