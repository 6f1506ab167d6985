//! Requests whose results are fetched later. A future is named by the model or sampler and the number of its
//! request, so a repeated request finds the existing future.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::future_result::FutureResult;
use crate::{
    errors::ApiError,
    lock::lock,
    tenant_memory::{MemoryFull, Reservation},
};

/// Maximum number of futures per tenant.
const MAX_PROMISES: usize = 8192;
/// Bytes of tenant memory that a future counts besides its work and its result.
pub(crate) const PROMISE_BYTES: usize = 2048;
/// Time that a fetched result is kept, because the answer may have been lost.
const KEPT_FETCHED: Duration = Duration::from_secs(60);
/// Time that a result is kept which was not fetched.
const KEPT: Duration = Duration::from_secs(15 * 60);

#[derive(Debug)]
pub struct RequestFuture {
    /// Bytes of the work until it is done, then of the result.
    memory: Mutex<Reservation>,
    tenant: Arc<str>,
    outcome: watch::Sender<Option<Arc<FutureResult>>>,
    times: Mutex<FutureTimes>,
    /// Reason for the wait, as text for the user.
    reason: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct FutureTimes {
    kept: Option<Instant>,
    fetched: Option<Instant>,
}

impl RequestFuture {
    /// Stores the outcome; a second outcome is ignored. A result that does not fit the tenant's memory
    /// becomes a refusal.
    pub(crate) fn keep(&self, outcome: FutureResult) {
        lock(&self.times).kept.get_or_insert_with(Instant::now);
        self.outcome.send_if_modified(|kept| {
            let is_first = kept.is_none();
            kept.get_or_insert_with(|| Arc::new(self.counted(outcome)));
            is_first
        });
    }

    /// Returns the outcome after its bytes have replaced those of the work in the reservation.
    fn counted(&self, outcome: FutureResult) -> FutureResult {
        match self.resize_reservation(outcome.bytes()) {
            Ok(()) => outcome,
            Err(full) => FutureResult::Failed(ApiError::from(full).into()),
        }
    }

    /// Replaces the reserved bytes of the work or result by `bytes`.
    ///
    /// # Errors
    /// If the bytes do not fit the tenant's memory; the reservation is unchanged then.
    pub(crate) fn resize_reservation(&self, bytes: usize) -> Result<(), MemoryFull> {
        lock(&self.memory).resize(PROMISE_BYTES + bytes)
    }

    pub(crate) fn set_reason(&self, reason: String) {
        *lock(&self.reason) = Some(reason);
    }

    /// Returns the reason for the wait, if it was set.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    /// Waits at most `patience` for the outcome.
    pub async fn wait(&self, patience: Duration) -> Option<Arc<FutureResult>> {
        let mut watched = self.outcome.subscribe();
        let kept = tokio::time::timeout(patience, watched.wait_for(Option::is_some)).await;
        let outcome = kept.ok()?.ok()?.clone();
        lock(&self.times).fetched.get_or_insert_with(Instant::now);
        outcome
    }

    fn is_over(&self, now: Instant) -> bool {
        let times = lock(&self.times);
        let since = |time: Option<Instant>| time.map(|time| now.saturating_duration_since(time));
        since(times.fetched).is_some_and(|age| age > KEPT_FETCHED)
            || since(times.kept).is_some_and(|age| age > KEPT)
    }
}

/// All futures by name.
#[derive(Debug, Default)]
pub struct RequestFutures(Mutex<HashMap<String, Arc<RequestFuture>>>);

/// Whether a future existed already.
#[derive(Debug)]
pub(crate) enum InsertedFuture {
    /// The future is new, and its result must be stored.
    Now(Arc<RequestFuture>),
    /// A request with this name is in progress or done.
    Before,
}

impl RequestFutures {
    /// Creates the future `id` for the tenant of `memory`.
    ///
    /// # Errors
    /// If the tenant has too many futures.
    pub(crate) fn make(&self, id: &str, memory: Reservation) -> Result<InsertedFuture, ApiError> {
        let (mut all, tenant) = (lock(&self.0), Arc::clone(memory.tenant()));
        if all.get(id).is_some_and(|promise| promise.tenant == tenant) {
            return Ok(InsertedFuture::Before);
        }
        let count = all.values().filter(|promise| promise.tenant == tenant).count();
        if count >= MAX_PROMISES {
            let message = format!(
                "{count} requests wait or have unread results, which is the limit; fetch some before you \
                 send more"
            );
            return Err(ApiError::busy("too_many_futures", message));
        }
        let promise = Arc::new(RequestFuture {
            memory: Mutex::new(memory),
            tenant,
            outcome: watch::Sender::new(None),
            times: Mutex::default(),
            reason: Mutex::default(),
        });
        all.insert(id.to_owned(), Arc::clone(&promise));
        Ok(InsertedFuture::Now(promise))
    }

    /// Returns the future `id` if it belongs to `tenant`.
    #[must_use]
    pub fn find(&self, id: &str, tenant: &str) -> Option<Arc<RequestFuture>> {
        lock(&self.0).get(id).filter(|promise| *promise.tenant == *tenant).cloned()
    }

    /// Removes futures whose results are no longer kept.
    pub fn sweep(&self) {
        let now = Instant::now();
        lock(&self.0).retain(|_, promise| !promise.is_over(now));
    }
}

#[cfg(test)]
mod tests {
    use control_protocol::training::session::CommandRefusal;

    use super::*;
    use crate::tenant_memory::{MemoryLimits, TenantMemory};

    fn made(promises: &RequestFutures, memory: &Arc<TenantMemory>, bytes: usize) -> Arc<RequestFuture> {
        let memory = memory.reserve(&"alice".into(), PROMISE_BYTES + bytes).unwrap();
        match promises.make("p", memory).unwrap() {
            InsertedFuture::Now(promise) => promise,
            InsertedFuture::Before => panic!("it is new"),
        }
    }

    #[tokio::test]
    async fn a_promise_counts_its_work_then_its_result_and_nothing_once_it_is_forgotten() {
        let memory = TenantMemory::new(MemoryLimits { tenant_bytes: 1 << 20, total_bytes: 1 << 20 });
        let promises = RequestFutures::default();
        let promise = made(&promises, &memory, 100_000);
        promise.keep(FutureResult::Protobuf(vec![0; 1000].into()));
        promise.keep(FutureResult::Failed(CommandRefusal::user("a second outcome")));
        assert_eq!(memory.used_by("alice"), PROMISE_BYTES + 1000);
        lock(&promise.times).fetched = Some(Instant::now() - KEPT_FETCHED * 2);
        drop(promise);
        promises.sweep();
        assert_eq!(memory.used(), 0);
    }

    #[tokio::test]
    async fn a_result_that_does_not_fit_its_tenants_memory_becomes_a_refusal() {
        let memory = TenantMemory::new(MemoryLimits { tenant_bytes: 10_000, total_bytes: 1 << 20 });
        let promise = made(&RequestFutures::default(), &memory, 0);
        promise.keep(FutureResult::Protobuf(vec![0; 10_000].into()));
        let outcome = promise.wait(Duration::ZERO).await.expect("an answer");
        let FutureResult::Failed(refusal) = &*outcome else { panic!("it does not fit") };
        assert!(refusal.message.contains("--tenant-memory-bytes"), "{}", refusal.message);
        assert_eq!(memory.used_by("alice"), PROMISE_BYTES);
    }
}
