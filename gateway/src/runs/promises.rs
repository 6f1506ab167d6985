//! Requests whose answers are fetched later. A promise has the name of what it is of, so that whoever sends a request again
//! gets the promise there is.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::outcome::Outcome;
use crate::errors::ApiError;

/// Most promises of a tenant.
const MAX_PROMISES: usize = 8192;
/// Most bytes of results that a tenant has not fetched.
const MAX_BYTES: usize = 256 << 20;
/// How long a result is kept that was fetched: its answer may have been lost.
const KEPT_FETCHED: Duration = Duration::from_secs(60);
/// How long one is kept that was not.
const KEPT: Duration = Duration::from_secs(15 * 60);

/// A request whose answer is fetched later.
#[derive(Debug)]
pub struct Promise {
    tenant: Arc<str>,
    outcome: watch::Sender<Option<Arc<Outcome>>>,
    times: Mutex<Times>,
    /// What it waits for, for a person.
    reason: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct Times {
    kept: Option<Instant>,
    fetched: Option<Instant>,
}

impl Promise {
    /// Keeps it. A second outcome changes nothing.
    pub fn keep(&self, outcome: Outcome) {
        lock(&self.times).kept.get_or_insert_with(Instant::now);
        self.outcome.send_if_modified(|kept| {
            let is_first = kept.is_none();
            kept.get_or_insert_with(|| Arc::new(outcome));
            is_first
        });
    }

    /// Says what it waits for.
    pub fn say(&self, reason: String) {
        *lock(&self.reason) = Some(reason);
    }

    /// What it waits for, if that is said.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    /// What came of it, once it has; nothing if it has not within `patience`.
    pub async fn wait(&self, patience: Duration) -> Option<Arc<Outcome>> {
        let mut watched = self.outcome.subscribe();
        let kept = tokio::time::timeout(patience, watched.wait_for(Option::is_some)).await;
        let outcome = kept.ok()?.ok()?.clone();
        lock(&self.times).fetched.get_or_insert_with(Instant::now);
        outcome
    }

    fn bytes(&self) -> usize {
        self.outcome.borrow().as_ref().map_or(0, |outcome| outcome.bytes())
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
pub struct Promises(Mutex<HashMap<String, Arc<Promise>>>);

/// Whether a promise was there already.
#[derive(Debug)]
pub enum Made {
    /// It is to be kept.
    Now(Arc<Promise>),
    /// Somebody is at it.
    Before,
}

impl Promises {
    /// A promise of this name.
    ///
    /// # Errors
    /// The tenant has too many.
    pub fn make(&self, id: &str, tenant: &Arc<str>) -> Result<Made, ApiError> {
        let mut all = lock(&self.0);
        if all.get(id).is_some_and(|promise| promise.tenant == *tenant) {
            return Ok(Made::Before);
        }
        let own = all.values().filter(|promise| promise.tenant == *tenant);
        let (count, bytes) = own.fold((0, 0), |(count, bytes), own| (count + 1, bytes + own.bytes()));
        if count >= MAX_PROMISES || bytes >= MAX_BYTES {
            let message = format!(
                "{count} requests with {bytes} bytes of results wait to be fetched; fetch some before you send more"
            );
            return Err(ApiError::busy("too_many_futures", message));
        }
        let promise = Arc::new(Promise {
            tenant: Arc::clone(tenant),
            outcome: watch::Sender::new(None),
            times: Mutex::default(),
            reason: Mutex::default(),
        });
        all.insert(id.to_owned(), Arc::clone(&promise));
        Ok(Made::Now(promise))
    }

    /// The promise of this name, if it is this tenant's.
    #[must_use]
    pub fn find(&self, id: &str, tenant: &str) -> Option<Arc<Promise>> {
        lock(&self.0).get(id).filter(|promise| *promise.tenant == *tenant).cloned()
    }

    /// Forgets what nobody will ask for.
    pub fn sweep(&self) {
        let now = Instant::now();
        lock(&self.0).retain(|_, promise| !promise.is_over(now));
    }
}

/// Every lock guards a value that is whole between two statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
