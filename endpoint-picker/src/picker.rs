//! What all streams share: the hosts, how much may be held, and what is counted.

use std::{sync::Arc, time::Instant};

use tokio::sync::Semaphore;

use crate::{
    ask::{Ask, Head},
    fleet::{
        Fleet, Rules,
        choice::{Pick, Refusal, Subset},
    },
    metrics::{Metrics, Outcome},
};

/// Bytes of bodies that are held until their requests are placed, of all requests together.
pub const MAX_HELD_BYTES: usize = 256 << 20;

/// See the module's description.
#[derive(Debug)]
pub struct Picker {
    /// All hosts.
    pub fleet: Fleet,
    /// What is counted.
    pub metrics: Metrics,
    /// Longest body of a request, in bytes.
    pub max_body_bytes: usize,
    /// Bytes of bodies that may still be held: a permit for each.
    pub(crate) room: Arc<Semaphore>,
}

impl Picker {
    /// Knows no hosts yet.
    #[must_use]
    pub fn new(rules: Rules, max_body_bytes: usize) -> Self {
        let room = Arc::new(Semaphore::new(MAX_HELD_BYTES));
        Self { fleet: Fleet::new(rules), metrics: Metrics::default(), max_body_bytes, room }
    }

    /// Whether one of the hosts is ready, as it said lately.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.fleet.count(Instant::now()).ready > 0
    }

    /// Reads a request and says where it goes.
    ///
    /// # Errors
    /// Why it goes nowhere.
    pub fn decide(&self, head: &Head, body: &[u8], subset: &Subset) -> Result<Pick, Refusal> {
        let began = Instant::now();
        let ask = Ask::read(body);
        let decided = self.fleet.pick(head, &ask, subset, began);
        let outcome = match &decided {
            Ok(_) => Outcome::Picked,
            Err(Refusal::Nobody) => Outcome::Nobody,
            Err(Refusal::Late { .. }) => Outcome::Late,
        };
        self.metrics.decided(
            outcome,
            decided.as_ref().ok().and_then(|pick| pick.endpoints.first()),
            began.elapsed(),
        );
        decided
    }
}
