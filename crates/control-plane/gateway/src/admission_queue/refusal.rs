//! Why the admission queue refuses a request.

use crate::service_classes::Objective;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueRefusal {
    /// The queue is full, and no other tenant holds more of it.
    #[error("{limit} sequences wait, which is the limit (--max-sequences); try again in {wait_s} s")]
    Full {
        /// Maximum number of waiting sequences.
        limit: usize,
        /// Expected wait of a new request, in seconds.
        wait_s: u32,
    },
    #[error("the request needs {asked} sequences, and a base-executor runs at most {limit}; request fewer")]
    TooMany { asked: usize, limit: usize },
    #[error(
        "requests wait longer than {target_ms} ms (--codel-target-ms), and a new one would wait about \
         {wait_s} s; try again then"
    )]
    Overload { target_ms: u128, wait_s: u32 },
    #[error(
        "the service class '{class}' allows {limit} {what} per minute and tenant, which are used up; try \
         again in {wait_s} s"
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
        "the request would take about {forecast_ms} ms {}, and the target of the service class '{class}' \
         is {promised_ms} ms ({}_ms); try again in {wait_s} s",
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
    /// Background requests have no capacity beside the online requests.
    #[error("online requests use all capacity; try again in 1 s")]
    OnlineFirst,
    #[error("the deadline passed while the request waited in the queue; send it again with a later deadline")]
    Late,
    /// No executor has been open for some time.
    #[error("no base-executor is ready, or all are drained (see 'holobiont status'); try again shortly")]
    Nobody,
}
