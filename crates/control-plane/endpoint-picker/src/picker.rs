//! State that all streams share: the hosts, the limit of held bytes, and the metrics.

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

/// Maximum number of body bytes held until their hosts are chosen, over all requests.
pub(crate) const MAX_HELD_BYTES: usize = 256 << 20;

#[derive(Debug)]
pub struct Picker {
    pub fleet: HostFleet,
    pub metrics: PickerMetrics,
    /// Maximum size of a request body, in bytes.
    pub max_body_bytes: usize,
    /// One permit per byte of body that may still be held.
    pub(crate) body_permits: Arc<Semaphore>,
}

impl Picker {
    #[must_use]
    pub fn new(rules: PickRules, max_body_bytes: usize) -> Self {
        let body_permits = Arc::new(Semaphore::new(MAX_HELD_BYTES));
        Self { fleet: HostFleet::new(rules), metrics: PickerMetrics::default(), max_body_bytes, body_permits }
    }

    /// Whether any host is ready by its latest report.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.fleet.count(Instant::now()).ready > 0
    }

    /// Parses a request and chooses its hosts.
    ///
    /// # Errors
    /// If no host is ready, or none can meet the SLO targets.
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
