//! Why the admission queue refuses a request.

use crate::service_classes::Objective;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueRefusal {
    /// The queue is full, and no other tenant holds more of it.
    #[error("{limit} sequences wait, which is all there may be (--max-sequences); try again in {wait_s} s")]
    Full {
        /// Maximum number of waiting sequences.
        limit: usize,
        /// Expected wait of a new request, in seconds.
        wait_s: u32,
    },
    #[error(
        "{asked} sequences are asked for at once, but a base-executor takes {limit} in all; ask for fewer"
    )]
    TooMany { asked: usize, limit: usize },
    #[error(
        "requests have waited for longer than {target_ms} ms (--codel-target-ms) for some time; a new one would wait \
         about {wait_s} s, try again then"
    )]
    Overload { target_ms: u128, wait_s: u32 },
    #[error(
        "the service class '{class}' has {limit} {what} a minute for each tenant, and they are used up; try again in {wait_s} s"
    )]
    UsedUp {
        class: String,
        /// Limited quantity: `requests` or `tokens`.
        what: &'static str,
        limit: u32,
        /// Seconds until some of the limit is available again.
        wait_s: u32,
    },
    /// The request would miss an SLO target of its service class.
    #[error(
        "it would take about {forecast_ms} ms {}, and the service class '{class}' is promised {promised_ms} ms ({}_ms); \
         try again in {wait_s} s",
        match objective { Objective::FirstToken => "to the first token", Objective::PerToken => "for each token" },
        objective.name()
    )]
    Promise {
        class: String,
        objective: Objective,
        forecast_ms: u64,
        /// SLO target in milliseconds.
        promised_ms: u64,
        /// Seconds until the target may be met again.
        wait_s: u32,
    },
    #[error("the deadline passed while the request waited for its turn; send it again, or with a later one")]
    Late,
    /// No executor has been open for some time.
    #[error(
        "no base-executor serves, or every one is drained ('holobiont status' says which); try again shortly"
    )]
    Nobody,
}
