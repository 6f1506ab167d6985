//! The admission queue holds requests of all tenants until executors have capacity.
//!
//! - this module: the queue's interface, and [`AdmissionPermit`]; [`refusal`]: why a request is refused.
//! - `state`: the fair queue (`scheduling::fairness`), the limits per tenant, and immediate refusals.
//!
//! An executor computes requests in the order of their arrival. So the queue sends it only enough to keep it
//! busy ([`FreeCapacity`](crate::executors::FreeCapacity)), and decides at that moment which request goes
//! next: by class, then by the fewest served tokens per weight. A tenant that sends too much lengthens only
//! its own queue, and is refused when that queue is delayed for too long.
//!
//! Background requests wait in a queue of their own. Background requests start only while no online request
//! waits, and [`BackgroundLimit`](scheduling::fairness::background_limit::BackgroundLimit) bounds how many
//! run.

pub mod refusal;
mod state;
#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use scheduling::{admission::DelayLimits, clock::Clock, routing::Forecast};
use tokio::{
    sync::{oneshot, watch},
    time::{Instant, timeout},
};

use self::state::{AdmittedRequest, QueueState};
pub use self::{refusal::QueueRefusal, state::TenantQueueStats};
use crate::{
    executors::{Executors, FreeCapacity},
    lock::lock,
    queue_delay::WaitingEntry,
    service_classes::{ClassId, ServiceClasses},
};

/// How often a waiting request checks whether any executor is open, and the queue its limits.
const LOOK: Duration = Duration::from_secs(1);
/// How long a background request waits for capacity. The waiting request holds its adapter, so an unload of
/// the adapter waits as long.
const BACKGROUND_PATIENCE: Duration = Duration::from_secs(5);
/// How long a request waits without any open executor.
const ABSENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdmissionLimits {
    /// Maximum number of waiting sequences.
    pub max_sequences: usize,
    /// CoDel limits: how long a tenant's requests may wait before new ones are refused.
    pub delays: DelayLimits,
    /// Share of an executor's batch slots that over-quota tenants may hold together.
    pub burst_share: f64,
    /// Share of an executor's batch slots for background requests while there are no online requests.
    pub background_share: f64,
    /// Number of background sequences per executor beside online requests.
    pub background_beside: usize,
}

/// Tenant and class to which a request is charged.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Principal {
    pub class: ClassId,
    /// Tenant of the request's API key.
    pub tenant: Arc<str>,
}

#[derive(Debug, Clone)]
pub struct AdmissionRequest {
    pub principal: Principal,
    /// Number of sequences that start together.
    pub sequences: usize,
    /// Estimated cost in tokens, as far as it is known.
    pub cost_tokens: u64,
    /// Time after which the request is refused.
    pub deadline: Option<Instant>,
    /// Predicted latency beside the running requests; `None` if there are none, or no prediction is possible.
    pub forecast: Option<Forecast>,
}

/// The queue of all tenants; clones share it.
#[derive(Debug, Clone)]
pub struct AdmissionQueue(Arc<AdmissionShared>);

#[derive(Debug)]
struct AdmissionShared {
    executors: Executors,
    limits: AdmissionLimits,
    background_class: ClassId,
    state: Mutex<QueueState>,
    /// Number of background sequences that may run now.
    background_slots: watch::Sender<usize>,
}

/// A position in the queue, given up on drop.
struct QueueTicket<'a> {
    queue: &'a AdmissionQueue,
    /// `None` once the permit was granted.
    number: Option<u64>,
}

/// The right to send one request to an executor; dropping it settles the token account.
#[derive(Debug)]
pub struct AdmissionPermit {
    queue: AdmissionQueue,
    principal: Principal,
    sequences: usize,
    /// Number of sequences without a first token.
    unbegun: usize,
    /// Queue entries of the sequences, until they are sent.
    pub waiting: Vec<WaitingEntry>,
    charged_tokens: u64,
    served_tokens: u64,
    /// True while capacity of an executor is reserved for the request.
    is_reserved: bool,
}

impl AdmissionQueue {
    /// Creates a queue before `executors`, which dispatches whenever they report free capacity.
    #[must_use]
    pub fn new(
        executors: Executors,
        classes: Arc<ServiceClasses>,
        limits: AdmissionLimits,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let changed = Arc::clone(executors.capacity_changed());
        let background_class = classes.background();
        let state = Mutex::new(QueueState::new(limits, classes, clock));
        let background_slots = watch::Sender::new(0);
        let queue =
            Self(Arc::new(AdmissionShared { executors, limits, background_class, state, background_slots }));
        let shared = Arc::downgrade(&queue.0);
        tokio::spawn(async move {
            loop {
                // The limit of background requests also changes with time.
                let _ = timeout(LOOK, changed.notified()).await;
                let Some(shared) = shared.upgrade() else { return };
                Self(shared).dispatch();
            }
        });
        queue
    }

    /// Fails if every request of `tenant` would be refused now. Callers ask before they parse, so that a
    /// flood of requests costs little.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check(&self, tenant: &Arc<str>) -> Result<(), QueueRefusal> {
        let capacity = self.free_capacity();
        lock(&self.0.state).check_tenant(tenant, capacity)
    }

    /// Checks whether `sequences` sequences can ever run together, before any of them is created.
    ///
    /// # Errors
    /// If `sequences` is more than executors accept.
    pub(crate) fn check_size(&self, sequences: usize) -> Result<(), QueueRefusal> {
        state::fits(sequences, self.free_capacity())
    }

    /// Waits for a permit. Dropping the future leaves the queue.
    ///
    /// # Errors
    /// The reason of the refusal: at once, or when the deadline passes.
    pub async fn wait(&self, asked: AdmissionRequest) -> Result<AdmissionPermit, QueueRefusal> {
        let deadline = asked.deadline;
        let is_background = asked.principal.class == self.0.background_class;
        let give_up = is_background.then(|| Instant::now() + BACKGROUND_PATIENCE);
        let (mut ticket, mut permit) = self.join(&asked)?;
        let mut absent = Duration::ZERO;
        loop {
            let left = deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(Instant::now()));
            match timeout(left.min(LOOK), &mut permit).await {
                Ok(permit) => {
                    ticket.number = None;
                    return permit.unwrap_or(Err(QueueRefusal::Nobody));
                }
                Err(_) if left <= LOOK && deadline.is_some() => return Err(QueueRefusal::Late),
                Err(_) if give_up.is_some_and(|until| Instant::now() >= until) => {
                    return Err(QueueRefusal::OnlineFirst);
                }
                Err(_) if self.0.executors.all().iter().any(|one| one.is_open()) => absent = Duration::ZERO,
                Err(_) if absent >= ABSENCE => return Err(QueueRefusal::Nobody),
                Err(_) => absent += LOOK,
            }
        }
    }

    /// Returns the number of background sequences that may run, and follows its changes. Callers stop
    /// background requests that exceed a lower number.
    #[must_use]
    pub(crate) fn background_slots(&self) -> watch::Receiver<usize> {
        self.0.background_slots.subscribe()
    }

    #[must_use]
    pub fn stats(&self) -> Vec<TenantQueueStats> {
        lock(&self.0.state).stats()
    }

    /// Number of waiting sequences.
    #[must_use]
    pub(crate) fn queued(&self) -> usize {
        lock(&self.0.state).queued()
    }

    fn join(
        &self,
        asked: &AdmissionRequest,
    ) -> Result<(QueueTicket<'_>, oneshot::Receiver<Result<AdmissionPermit, QueueRefusal>>), QueueRefusal>
    {
        let capacity = self.free_capacity();
        let (number, permit) = lock(&self.0.state).join(asked, capacity)?;
        self.dispatch();
        Ok((QueueTicket { queue: self, number: Some(number) }, permit))
    }

    fn free_capacity(&self) -> FreeCapacity {
        let AdmissionLimits { burst_share, background_share, background_beside, .. } = self.0.limits;
        self.0.executors.free_capacity(burst_share, (background_share, background_beside))
    }

    fn dispatch(&self) {
        let capacity = self.free_capacity();
        let (grants, slots) = {
            let mut state = lock(&self.0.state);
            (state.dispatch(capacity), state.background_slots(capacity))
        };
        // While no executor is open, running background requests wait for one as online requests do.
        if capacity.places.executors > 0 {
            self.0.background_slots.send_if_modified(|known| std::mem::replace(known, slots) != slots);
        }
        for AdmittedRequest { principal, sequences, charged_tokens, waiter } in grants {
            let permit = AdmissionPermit {
                queue: self.clone(),
                principal,
                sequences,
                unbegun: sequences,
                waiting: waiter.waiting,
                charged_tokens,
                served_tokens: 0,
                is_reserved: true,
            };
            // If the request no longer waits, its permit is dropped and so returned.
            _ = waiter.permit.send(Ok(permit));
        }
    }
}

impl Drop for QueueTicket<'_> {
    fn drop(&mut self) {
        let left = self.number.and_then(|number| lock(&self.queue.0.state).cancel(number));
        drop(left);
    }
}

impl AdmissionPermit {
    /// Releases the reserved capacity: the request is running, or waits for something other than an executor.
    pub(crate) fn release(&mut self) {
        if std::mem::take(&mut self.is_reserved) {
            lock(&self.queue.0.state).release();
            self.queue.0.executors.capacity_changed().notify_one();
        }
    }

    /// Counts `tokens` computed prompt or answer tokens.
    pub fn serve(&mut self, tokens: u64) {
        self.served_tokens += tokens;
    }

    /// Notes that `sequences` of the sequences have their first tokens.
    pub fn begin(&mut self, sequences: usize) {
        self.unbegun -= sequences;
        lock(&self.queue.0.state).begin(&self.principal, sequences);
        self.queue.0.executors.capacity_changed().notify_one();
    }
}

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        self.release();
        self.begin(self.unbegun);
        let tokens = [self.charged_tokens, self.served_tokens];
        lock(&self.queue.0.state).reconcile(&self.principal, self.sequences, tokens);
        self.queue.0.executors.capacity_changed().notify_one();
    }
}
