//! Requests whose answers are fetched later. A promise has the name of what it is of, so that whoever sends a request again
//! gets the promise there is.

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

/// Most promises of a tenant.
const MAX_PROMISES: usize = 8192;
/// Bytes that a promise is counted with besides its work and its result: its names, its place, small numbers.
pub const PROMISE_BYTES: usize = 2048;
/// How long a result is kept that was fetched: its answer may have been lost.
const KEPT_FETCHED: Duration = Duration::from_secs(60);
/// How long one is kept that was not.
const KEPT: Duration = Duration::from_secs(15 * 60);

/// A request whose answer is fetched later.
#[derive(Debug)]
pub struct RequestFuture {
    /// Bytes of the work until it is done, then of the result.
    memory: Mutex<Reservation>,
    /// Whose it is.
    tenant: Arc<str>,
    outcome: watch::Sender<Option<Arc<FutureResult>>>,
    times: Mutex<FutureTimes>,
    /// What it waits for, for a person.
    reason: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct FutureTimes {
    kept: Option<Instant>,
    fetched: Option<Instant>,
}

impl RequestFuture {
    /// Keeps it. A second outcome changes nothing. A result that does not fit the tenant's memory becomes a refusal.
    pub fn keep(&self, outcome: FutureResult) {
        lock(&self.times).kept.get_or_insert_with(Instant::now);
        self.outcome.send_if_modified(|kept| {
            let is_first = kept.is_none();
            kept.get_or_insert_with(|| Arc::new(self.counted(outcome)));
            is_first
        });
    }

    /// The outcome, with its bytes in the place of the work's.
    fn counted(&self, outcome: FutureResult) -> FutureResult {
        match self.resize_reservation(outcome.bytes()) {
            Ok(()) => outcome,
            Err(full) => FutureResult::Failed(ApiError::from(full).into()),
        }
    }

    /// Counts `bytes` of work or of a result in the place of what was counted before.
    ///
    /// # Errors
    /// They do not fit the tenant's memory; what was counted before stays.
    pub fn resize_reservation(&self, bytes: usize) -> Result<(), MemoryFull> {
        lock(&self.memory).resize(PROMISE_BYTES + bytes)
    }

    /// Says what it waits for.
    pub fn set_reason(&self, reason: String) {
        *lock(&self.reason) = Some(reason);
    }

    /// What it waits for, if that is said.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    /// What came of it, once it has; nothing if it has not within `patience`.
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

/// All of them.
#[derive(Debug, Default)]
pub struct RequestFutures(Mutex<HashMap<String, Arc<RequestFuture>>>);

/// Whether a promise was there already.
#[derive(Debug)]
pub enum InsertedFuture {
    /// It is to be kept.
    Now(Arc<RequestFuture>),
    /// Somebody is at it.
    Before,
}

impl RequestFutures {
    /// A promise of this name, of the tenant whose `memory` its work is counted to.
    ///
    /// # Errors
    /// The tenant has too many.
    pub fn make(&self, id: &str, memory: Reservation) -> Result<InsertedFuture, ApiError> {
        let (mut all, tenant) = (lock(&self.0), Arc::clone(memory.tenant()));
        if all.get(id).is_some_and(|promise| promise.tenant == tenant) {
            return Ok(InsertedFuture::Before);
        }
        let count = all.values().filter(|promise| promise.tenant == tenant).count();
        if count >= MAX_PROMISES {
            let message =
                format!("{count} requests wait to be done or fetched; fetch some before you send more");
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

    /// The promise of this name, if it is this tenant's.
    #[must_use]
    pub fn find(&self, id: &str, tenant: &str) -> Option<Arc<RequestFuture>> {
        lock(&self.0).get(id).filter(|promise| *promise.tenant == *tenant).cloned()
    }

    /// Forgets what nobody will ask for.
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
