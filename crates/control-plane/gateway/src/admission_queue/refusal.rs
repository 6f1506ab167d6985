//! Why a request has no turn.

use crate::service_classes::Objective;

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueRefusal {
    /// The queue is full, and nobody else has more of it.
    #[error("{limit} sequences wait, which is all there may be (--max-sequences); try again in {wait_s} s")]
    Full {
        /// How many may wait.
        limit: usize,
        /// How long a new one would wait.
        wait_s: u32,
    },
    /// One request has more sequences than any executor ever computes or lets wait at a time.
    #[error(
        "{asked} sequences are asked for at once, but a base-executor takes {limit} in all; ask for fewer"
    )]
    TooMany {
        /// Sequences of the request.
        asked: usize,
        /// Sequences there may be.
        limit: usize,
    },
    /// The tenant's requests wait for longer than they should, and have done so for some time.
    #[error(
        "requests have waited for longer than {target_ms} ms (--codel-target-ms) for some time; a new one would wait \
         about {wait_s} s, try again then"
    )]
    Overload {
        /// How long they may wait for long.
        target_ms: u128,
        /// How long a new request would wait, rounded up.
        wait_s: u32,
    },
    /// More than the tenant may have in a minute.
    #[error(
        "the service class '{class}' has {limit} {what} a minute for each tenant, and they are used up; try again in {wait_s} s"
    )]
    UsedUp {
        /// The class.
        class: String,
        /// What is limited.
        what: &'static str,
        /// How many there are in a minute.
        limit: u32,
        /// After so long some are there again.
        wait_s: u32,
    },
    /// What its class was promised would not be kept.
    #[error(
        "it would take about {forecast_ms} ms {}, and the service class '{class}' is promised {promised_ms} ms ({}_ms); \
         try again in {wait_s} s",
        match objective { Objective::FirstToken => "to the first token", Objective::PerToken => "for each token" },
        objective.name()
    )]
    Promise {
        /// The class.
        class: String,
        /// What was promised.
        objective: Objective,
        /// What it would take.
        forecast_ms: u64,
        /// What was promised.
        promised_ms: u64,
        /// When it may be kept again.
        wait_s: u32,
    },
    /// Its deadline passed.
    #[error("the deadline passed while the request waited for its turn; send it again, or with a later one")]
    Late,
    /// There has been no executor for some time.
    #[error(
        "no base-executor serves, or every one is drained ('holobiont status' says which); try again shortly"
    )]
    Nobody,
}
