//! Work whose result all waiting callers share.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex},
};

use tokio::sync::watch;

use crate::lock::lock;

/// Work under way, by key. The work runs in a task of its own, so it ends even if all callers leave.
#[derive(Debug)]
pub(in crate::adapters) struct SingleFlight<K: Eq + Hash, T>(Mutex<HashMap<K, watch::Receiver<Option<T>>>>);

/// Removes the work from the map when the work ends, also by a panic.
struct Ended<K: Eq + Hash, T> {
    flights: Arc<SingleFlight<K, T>>,
    key: K,
}

impl<K: Eq + Hash, T> Drop for Ended<K, T> {
    fn drop(&mut self) {
        lock(&self.flights.0).remove(&self.key);
    }
}

impl<K, T> SingleFlight<K, T>
where
    K: Eq + Hash + Clone + Send + Sync + 'static,
    T: Clone + Send + Sync + 'static,
{
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::default()))
    }

    /// Number of works under way whose key `is` accepts.
    pub(super) fn count(&self, is: impl Fn(&K) -> bool) -> usize {
        lock(&self.0).keys().filter(|key| is(key)).count()
    }

    /// Returns the result of the work `key`, which begins as `work` unless it is under way. Returns `None` if
    /// the work panicked.
    pub(in crate::adapters) async fn run<F>(self: &Arc<Self>, key: &K, work: impl FnOnce() -> F) -> Option<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut result = {
            let mut flights = lock(&self.0);
            match flights.get(key) {
                Some(result) => result.clone(),
                None => {
                    let (done, result) = watch::channel(None);
                    flights.insert(key.clone(), result.clone());
                    let ended = Ended { flights: Arc::clone(self), key: key.clone() };
                    let work = work();
                    tokio::spawn(async move {
                        let value = work.await;
                        drop(ended);
                        done.send_replace(Some(value));
                    });
                    result
                }
            }
        };
        result.wait_for(Option::is_some).await.ok().and_then(|value| value.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use tokio::sync::Semaphore;

    use super::*;

    struct Counter {
        begun: AtomicUsize,
        gate: Semaphore,
    }

    async fn count(counter: Arc<Counter>) -> usize {
        let number = counter.begun.fetch_add(1, Relaxed);
        drop(counter.gate.acquire().await);
        number
    }

    fn counter() -> Arc<Counter> {
        Arc::new(Counter { begun: AtomicUsize::new(0), gate: Semaphore::new(0) })
    }

    #[tokio::test]
    async fn all_who_ask_meanwhile_share_one_result_and_the_next_begins_again() {
        let (flights, counter) = (SingleFlight::new(), counter());
        let ask = || flights.run(&"a", || count(Arc::clone(&counter)));
        let open = async {
            tokio::task::yield_now().await;
            counter.gate.add_permits(1);
        };
        let (one, two, ()) = tokio::join!(ask(), ask(), open);
        assert_eq!((one, two), (Some(0), Some(0)));
        assert_eq!(ask().await, Some(1));
        assert_eq!(flights.count(|_| true), 0);
    }

    #[tokio::test]
    async fn work_goes_on_without_the_caller_that_began_it() {
        let (flights, counter) = (SingleFlight::new(), counter());
        let first = tokio::spawn({
            let (flights, counter) = (Arc::clone(&flights), Arc::clone(&counter));
            async move { flights.run(&"a", || count(counter)).await }
        });
        while counter.begun.load(Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let open = async { counter.gate.add_permits(1) };
        let (second, ()) = tokio::join!(flights.run(&"a", || count(Arc::clone(&counter))), open);
        assert_eq!(second, Some(0), "the work of the first caller");
    }

    #[tokio::test]
    async fn work_that_panics_is_forgotten() {
        let flights: Arc<SingleFlight<&str, u8>> = SingleFlight::new();
        assert_eq!(flights.run(&"a", || async { panic!("a fault, on purpose") }).await, None);
        assert_eq!(flights.run(&"a", || async { 7 }).await, Some(7));
    }
}
