//! What all streams share: the hosts, how much may be held, and what is counted.

use std::{sync::Arc, time::Instant};

use tokio::sync::Semaphore;

use crate::{
    fleet::{
        HostFleet, PickRules,
        choice::{Pick, PickRefusal, Subset},
    },
    metrics::{PickOutcome, PickerMetrics},
    request_parser::{ParsedRequest, RequestHead},
};

/// Bytes of bodies that are held until their requests are placed, of all requests together.
pub const MAX_HELD_BYTES: usize = 256 << 20;

/// See the module's description.
#[derive(Debug)]
pub struct Picker {
    /// All hosts.
    pub fleet: HostFleet,
    /// What is counted.
    pub metrics: PickerMetrics,
    /// Longest body of a request, in bytes.
    pub max_body_bytes: usize,
    /// Bytes of bodies that may still be held: a permit for each.
    pub(crate) room: Arc<Semaphore>,
}

impl Picker {
    /// Knows no hosts yet.
    #[must_use]
    pub fn new(rules: PickRules, max_body_bytes: usize) -> Self {
        let room = Arc::new(Semaphore::new(MAX_HELD_BYTES));
        Self { fleet: HostFleet::new(rules), metrics: PickerMetrics::default(), max_body_bytes, room }
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
    pub fn decide(&self, head: &RequestHead, body: &[u8], subset: &Subset) -> Result<Pick, PickRefusal> {
        let began = Instant::now();
        let ask = ParsedRequest::read(body);
        let decided = self.fleet.pick(head, &ask, subset, began);
        let outcome = match &decided {
            Ok(_) => PickOutcome::Picked,
            Err(PickRefusal::Nobody) => PickOutcome::Nobody,
            Err(PickRefusal::Late { .. }) => PickOutcome::Late,
        };
        self.metrics.decided(
            outcome,
            decided.as_ref().ok().and_then(|pick| pick.endpoints.first()),
            began.elapsed(),
        );
        decided
    }
}
