//! Locks that ignore poisoning, for values that stay valid if a holder panics; and locks by key.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::OwnedMutexGuard;

/// Locks `mutex`, also after a holder has panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One lock per key: work on a key waits only for other work on the same key.
#[derive(Debug)]
pub(crate) struct KeyedLocks<K>(Mutex<HashMap<K, Arc<tokio::sync::Mutex<()>>>>);

impl<K> Default for KeyedLocks<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> KeyedLocks<K> {
    /// Waits for the lock of `key` and takes it.
    pub(crate) async fn lock(&self, key: K) -> OwnedMutexGuard<()> {
        let of_key = {
            let mut locks = lock(&self.0);
            // Locks without a holder or waiter are forgotten.
            locks.retain(|_, of_key| Arc::strong_count(of_key) > 1);
            Arc::clone(locks.entry(key).or_default())
        };
        of_key.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_on_one_key_waits_for_the_same_key_alone() {
        let locks = KeyedLocks::default();
        let first = locks.lock("a").await;
        let _other = locks.lock("b").await;
        let mut same = Box::pin(locks.lock("a"));
        assert!(futures::FutureExt::now_or_never(&mut same).is_none(), "it is taken");
        drop(first);
        drop(same.await);
        drop(locks.lock("c").await);
        assert_eq!(lock(&locks.0).len(), 2, "locks that nobody needs are forgotten");
    }
}
