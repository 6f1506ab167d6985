//! State of the admission queue and of each tenant in it.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use scheduling::{
    admission::SlotAvailability,
    clock::Clock,
    fairness::{
        DequeuedRequest, FairLimits, FairQueue, QueueEntry, background_limit::BackgroundLimit,
        burst_limit::BurstLimit, service_rate::ServiceRate,
    },
    token_bucket::TokenBucket,
};
use tokio::sync::oneshot;

use super::{AdmissionLimits, AdmissionPermit, AdmissionRequest, Principal, QueueRefusal};
use crate::{
    clock::whole_seconds,
    executors::FreeCapacity,
    queue_delay::{DelayTracker, WaitingEntry},
    service_classes::{ClassState, Objective, ServiceClasses, SloOutcome},
};

/// Number of remembered tenants above which idle ones are forgotten.
const SWEEP_ABOVE: usize = 1024;

#[derive(Debug)]
pub(super) struct Waiter {
    number: u64,
    pub(super) permit: oneshot::Sender<Result<AdmissionPermit, QueueRefusal>>,
    pub(super) waiting: Vec<WaitingEntry>,
}

/// A request whose permit is granted.
#[derive(Debug)]
pub(super) struct AdmittedRequest {
    pub(super) principal: Principal,
    pub(super) sequences: usize,
    pub(super) charged_tokens: u64,
    pub(super) waiter: Waiter,
}

impl AdmittedRequest {
    fn of(dequeued: DequeuedRequest<Principal, Waiter>) -> Self {
        let QueueEntry { item, size, cost_tokens, .. } = dequeued.entry;
        Self { principal: dequeued.tenant, sequences: size, charged_tokens: cost_tokens, waiter: item }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantQueueStats {
    pub principal: Principal,
    /// Number of sequences without a token, here and in executors.
    pub waiting: usize,
    pub served_tokens: u64,
}

#[derive(Debug)]
struct TenantState {
    delay: DelayTracker,
    requests: Option<TokenBucket>,
    tokens: Option<TokenBucket>,
    served_tokens: u64,
}

#[derive(Debug)]
pub(super) struct QueueState {
    limits: AdmissionLimits,
    classes: Arc<ServiceClasses>,
    clock: Arc<dyn Clock>,
    started: Instant,
    queue: FairQueue<Principal, Waiter>,
    tenants: BTreeMap<Principal, TenantState>,
    rate: ServiceRate,
    burst_limit: BurstLimit<Principal>,
    /// Background requests; the other fields measure online requests alone.
    background: FairQueue<Principal, Waiter>,
    background_limit: BackgroundLimit,
    /// Number of granted permits whose capacity is still reserved.
    reserved: usize,
    last: u64,
}

impl QueueState {
    pub(super) fn new(limits: AdmissionLimits, classes: Arc<ServiceClasses>, clock: Arc<dyn Clock>) -> Self {
        let bounds = FairLimits { max_waiting: limits.max_sequences, ..FairLimits::default() };
        Self {
            limits,
            classes,
            started: clock.now(),
            clock,
            queue: FairQueue::new(bounds),
            tenants: BTreeMap::new(),
            rate: ServiceRate::default(),
            burst_limit: BurstLimit::default(),
            background: FairQueue::new(bounds),
            background_limit: BackgroundLimit::default(),
            reserved: 0,
            last: 0,
        }
    }

    /// Fails if every request of a tenant would be refused.
    pub(super) fn check_tenant(
        &mut self,
        tenant: &Arc<str>,
        capacity: FreeCapacity,
    ) -> Result<(), QueueRefusal> {
        if self.classes.look_at_adapters() {
            return Ok(());
        }
        let class = self.classes.of(None, tenant);
        self.check(&Principal { class, tenant: Arc::clone(tenant) }, capacity)
    }

    fn check(&mut self, principal: &Principal, capacity: FreeCapacity) -> Result<(), QueueRefusal> {
        self.check_rates(principal)?;
        let tenant = self.tenant(principal);
        let places = if capacity.requests > 0 { SlotAvailability::Free } else { SlotAvailability::Taken };
        match tenant.delay.check(places) {
            Err(overload) if self.has_its_share(principal) => Err(QueueRefusal::Overload {
                target_ms: overload.target.as_millis(),
                wait_s: whole_seconds(overload.forecast),
            }),
            _ => Ok(()),
        }
    }

    /// Fails if the tenant has used up a limit per minute of its class.
    fn check_rates(&mut self, principal: &Principal) -> Result<(), QueueRefusal> {
        let (now_us, classes) = (self.now_us(), Arc::clone(&self.classes));
        let class = classes.get(principal.class);
        let tenant = self.tenant(principal);
        let settings = &class.settings;
        for (bucket, limit, what) in [
            (&mut tenant.requests, settings.requests_per_min, "requests"),
            (&mut tenant.tokens, settings.tokens_per_min, "tokens"),
        ] {
            if let (Some(bucket), Some(limit)) = (bucket, limit) {
                bucket.check(now_us).map_err(|empty| {
                    class.tally.throttle();
                    let wait_s = whole_seconds(Duration::from_micros(empty.wait_us));
                    QueueRefusal::UsedUp { class: settings.name.clone(), what, limit: limit.get(), wait_s }
                })?;
            }
        }
        Ok(())
    }

    /// Whether a tenant has its share, by weight, of all waiting sequences. Tenants below their share do not
    /// cause the delay of others.
    fn has_its_share(&self, principal: &Principal) -> bool {
        let (mut all, mut weights, mut own) = (0, 0, (0, 1));
        let online = self.tenants.iter().filter(|(other, _)| !self.is_background(other));
        for (other, tenant) in online {
            let waiting = tenant.delay.waiting() as u64;
            let weight = u64::from(self.classes.get(other.class).settings.weight.get());
            if other == principal {
                own = (waiting, weight);
            }
            if waiting > 0 || other == principal {
                (all, weights) = (all + waiting, weights + weight);
            }
        }
        own.0 * weights >= all * own.1
    }

    /// Adds a request to the queue. Returns its number and the receiver of its permit.
    pub(super) fn join(
        &mut self,
        asked: &AdmissionRequest,
        capacity: FreeCapacity,
    ) -> Result<(u64, oneshot::Receiver<Result<AdmissionPermit, QueueRefusal>>), QueueRefusal> {
        fits(asked.sequences, capacity)?;
        let classes = Arc::clone(&self.classes);
        let class = classes.get(asked.principal.class);
        let is_background = self.is_background(&asked.principal);
        if is_background {
            // Waiting in the background is no sign of overload.
            self.check_rates(&asked.principal)?;
        } else {
            self.check(&asked.principal, capacity)?;
            self.keeps_promise(asked, class)?;
        }
        let now_us = self.now_us();
        self.last += 1;
        let (permit, receiver) = oneshot::channel();
        let tenant = self.tenant(&asked.principal);
        if let Some(requests) = &mut tenant.requests {
            requests.consume(1, now_us);
        }
        let wait_s = whole_seconds(tenant.delay.forecast());
        let waiting = tenant.delay.join(asked.sequences);
        let entry = QueueEntry {
            item: Waiter { number: self.last, permit, waiting },
            cost_tokens: asked.cost_tokens,
            size: asked.sequences.max(1),
            class: class.settings.priority,
            deadline_us: None,
        };
        let limit = self.limits.max_sequences;
        let full = || QueueRefusal::Full { limit, wait_s };
        let weight = class.settings.weight.get().into();
        let queue = if is_background { &mut self.background } else { &mut self.queue };
        let displaced = queue.push(&asked.principal, weight, entry).map_err(|_| full())?;
        let size = displaced.iter().map(|dequeued| dequeued.entry.size).sum();
        for dequeued in displaced {
            _ = dequeued.entry.item.permit.send(Err(full()));
        }
        class.tally.request();
        if !is_background {
            self.background_limit.end_online(size, now_us);
            self.background_limit.begin_online(asked.sequences.max(1));
            self.rate.observe(0, true, now_us);
            self.burst_limit.ask(&asked.principal, weight, now_us);
        }
        Ok((self.last, receiver))
    }

    /// Fails if a request that joins now would miss an SLO target of its class.
    fn keeps_promise(&self, asked: &AdmissionRequest, class: &ClassState) -> Result<(), QueueRefusal> {
        let ahead_tokens = match self.queue.is_empty() {
            true => 0,
            false => self.queue.ahead_tokens(&asked.principal),
        };
        let queued_us = self.rate.wait_us(ahead_tokens).unwrap_or(0);
        let forecast = asked.forecast;
        let first_us = queued_us + forecast.map_or(0, |forecast| forecast.ttft_us);
        let each_us = forecast.map_or(0, |forecast| forecast.tpot_us);
        for (objective, promised_us, forecast_us) in [
            (Objective::FirstToken, class.slo.ttft_us, first_us),
            (Objective::PerToken, class.slo.tpot_us, each_us),
        ] {
            let Some(promised_us) = promised_us.filter(|promised_us| forecast_us > *promised_us) else {
                continue;
            };
            class.tally.promise(objective, SloOutcome::Refused);
            return Err(QueueRefusal::Promise {
                class: class.settings.name.clone(),
                objective,
                forecast_ms: forecast_us.div_ceil(1000),
                promised_ms: promised_us / 1000,
                wait_s: whole_seconds(Duration::from_micros(forecast_us - promised_us)),
            });
        }
        Ok(())
    }

    /// Removes and returns the next requests for which there is capacity.
    pub(super) fn dispatch(&mut self, capacity: FreeCapacity) -> Vec<AdmittedRequest> {
        let now_us = self.now_us();
        let mut grants = Vec::new();
        self.burst_limit.update_waiting(|tenant| self.queue.waiting_of(tenant) > 0, now_us);
        while self.reserved < capacity.requests {
            let crowd = self.burst_limit.crowd(now_us);
            let may = |tenant: &Principal, waiter: &Waiter| {
                waiter.waiting.len() <= capacity.sequences && crowd.lets(tenant, capacity.places)
            };
            let Some(dequeued) = self.queue.pop(now_us, may) else { break };
            self.reserved += 1;
            self.burst_limit.send(&dequeued.tenant, dequeued.entry.size);
            grants.push(AdmittedRequest::of(dequeued));
        }
        self.burst_limit.update_waiting(|tenant| self.queue.waiting_of(tenant) > 0, now_us);
        self.rate.observe(0, !self.queue.is_empty(), now_us);
        while self.queue.is_empty()
            && self.reserved < capacity.requests
            && let Some(granted) = self.pop_background(capacity, now_us)
        {
            grants.push(granted);
        }
        grants
    }

    fn pop_background(&mut self, capacity: FreeCapacity, now_us: u64) -> Option<AdmittedRequest> {
        let limit = &self.background_limit;
        let dequeued = self.background.pop(now_us, |_, waiter| {
            let sequences = waiter.waiting.len();
            sequences <= capacity.sequences && limit.lets(sequences, capacity.background, now_us)
        })?;
        self.reserved += 1;
        self.background_limit.send(dequeued.entry.size);
        Some(AdmittedRequest::of(dequeued))
    }

    /// Returns the number of background sequences that may run now.
    pub(super) fn background_slots(&self, capacity: FreeCapacity) -> usize {
        self.background_limit.slots(capacity.background, self.now_us())
    }

    fn is_background(&self, principal: &Principal) -> bool {
        principal.class == self.classes.background()
    }

    /// Notes that `sequences` sequences have their first tokens, or will never have any.
    pub(super) fn begin(&mut self, principal: &Principal, sequences: usize) {
        self.burst_limit.begin(principal, sequences);
    }

    pub(super) fn cancel(&mut self, number: u64) -> Option<Waiter> {
        let now_us = self.now_us();
        let is_it = |waiter: &Waiter| waiter.number == number;
        if let Some(dequeued) = self.queue.cancel(is_it).pop() {
            self.background_limit.end_online(dequeued.entry.size, now_us);
            return Some(dequeued.entry.item);
        }
        self.background.cancel(is_it).pop().map(|dequeued| dequeued.entry.item)
    }

    pub(super) fn release(&mut self) {
        self.reserved -= 1;
    }

    /// Settles a finished request of `sequences` sequences: replaces the charged tokens by the served ones.
    pub(super) fn reconcile(
        &mut self,
        principal: &Principal,
        sequences: usize,
        [charged_tokens, served_tokens]: [u64; 2],
    ) {
        let (now_us, classes) = (self.now_us(), Arc::clone(&self.classes));
        let class = classes.get(principal.class);
        let weight = class.settings.weight.get().into();
        if self.is_background(principal) {
            self.background_limit.end(sequences, now_us);
            self.background.reconcile(principal, weight, charged_tokens, served_tokens);
        } else {
            self.background_limit.end_online(sequences, now_us);
            self.burst_limit.end(principal, sequences, served_tokens, now_us);
            self.queue.reconcile(principal, weight, charged_tokens, served_tokens);
            self.rate.observe(served_tokens, !self.queue.is_empty(), now_us);
        }
        class.tally.serve(served_tokens);
        let tenant = self.tenant(principal);
        tenant.served_tokens += served_tokens;
        if let Some(tokens) = &mut tenant.tokens {
            tokens.consume(served_tokens, now_us);
        }
    }

    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn stats(&self) -> Vec<TenantQueueStats> {
        let stats = self.tenants.iter().map(|(principal, tenant)| TenantQueueStats {
            principal: principal.clone(),
            waiting: tenant.delay.waiting(),
            served_tokens: tenant.served_tokens,
        });
        stats.collect()
    }

    fn tenant(&mut self, principal: &Principal) -> &mut TenantState {
        if self.tenants.len() > SWEEP_ABOVE && !self.tenants.contains_key(principal) {
            // Tenants with a limit per minute are kept, so that they cannot reset it by staying away.
            self.tenants.retain(|_, tenant| {
                !tenant.delay.is_left() || tenant.requests.is_some() || tenant.tokens.is_some()
            });
        }
        let (now_us, delays) = (self.now_us(), self.limits.delays);
        let settings = &self.classes.get(principal.class).settings;
        self.tenants.entry(principal.clone()).or_insert_with(|| {
            let bucket = |limit: Option<std::num::NonZeroU32>| {
                limit.map(|limit| TokenBucket::new(limit.get().into(), now_us))
            };
            TenantState {
                delay: DelayTracker::new(delays, Arc::clone(&self.clock)),
                requests: bucket(settings.requests_per_min),
                tokens: bucket(settings.tokens_per_min),
                served_tokens: 0,
            }
        })
    }

    fn now_us(&self) -> u64 {
        u64::try_from((self.clock.now() - self.started).as_micros()).unwrap_or(u64::MAX)
    }
}

/// Refuses a request with more sequences than executors can ever run together.
pub(super) fn fits(sequences: usize, capacity: FreeCapacity) -> Result<(), QueueRefusal> {
    if capacity.limit > 0 && sequences > capacity.limit {
        return Err(QueueRefusal::TooMany { asked: sequences, limit: capacity.limit });
    }
    Ok(())
}
