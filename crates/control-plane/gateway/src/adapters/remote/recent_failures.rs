//! The negative cache: failed fetches that are not tried again for a while.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::FetchKey;
use crate::{
    adapters::{
        errors::{FetchError, FetchRefusal},
        uri::AdapterUri,
    },
    lock::lock,
};

/// Maximum number of failures that are remembered per tenant.
const MAX_PER_TENANT: usize = 64;

/// Failures of one tenant, by URI.
type TenantFailures = HashMap<AdapterUri, RecentFailure>;

#[derive(Debug)]
pub(in crate::adapters) struct RecentFailures {
    /// Time for which a failure is remembered.
    kept: Duration,
    by_owner: Mutex<HashMap<Option<String>, TenantFailures>>,
}

#[derive(Debug)]
struct RecentFailure {
    error: FetchError,
    until: Instant,
}

impl RecentFailures {
    pub(super) fn new(kept: Duration) -> Self {
        Self { kept, by_owner: Mutex::default() }
    }

    /// Remembers why the fetch `key` failed, and returns the error for all who waited.
    pub(in crate::adapters) fn remember(&self, key: &FetchKey, error: FetchError) -> FetchRefusal {
        self.remember_at(key, error, Instant::now())
    }

    /// Returns the failure of the fetch `key`, if it is remembered.
    pub(in crate::adapters) fn find(&self, key: &FetchKey) -> Option<FetchRefusal> {
        self.find_at(key, Instant::now())
    }

    fn remember_at(&self, key: &FetchKey, error: FetchError, now: Instant) -> FetchRefusal {
        if !error.lasts() {
            return error.into();
        }
        let mut by_owner = lock(&self.by_owner);
        by_owner.retain(|_, failures| {
            failures.retain(|_, failure| failure.until > now);
            !failures.is_empty()
        });
        let failures = by_owner.entry(key.owner.clone()).or_default();
        let oldest = failures.iter().min_by_key(|(_, failure)| failure.until).map(|(uri, _)| uri.clone());
        if let Some(oldest) = oldest.filter(|_| failures.len() >= MAX_PER_TENANT) {
            failures.remove(&oldest);
        }
        failures.insert(key.uri.clone(), RecentFailure { error: error.clone(), until: now + self.kept });
        FetchRefusal { error, retry_after: Some(self.kept) }
    }

    fn find_at(&self, key: &FetchKey, now: Instant) -> Option<FetchRefusal> {
        let by_owner = lock(&self.by_owner);
        let failure = by_owner.get(&key.owner)?.get(&key.uri)?;
        let left = failure.until.checked_duration_since(now).filter(|left| !left.is_zero())?;
        Some(FetchRefusal { error: failure.error.clone(), retry_after: Some(left) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEPT: Duration = Duration::from_secs(30);

    fn key(owner: &str, name: &str) -> FetchKey {
        FetchKey { owner: Some(owner.to_owned()), uri: format!("hf://org/{name}").parse().unwrap() }
    }

    fn missing() -> FetchError {
        FetchError::Missing { uri: "hf://org/a".to_owned(), what: "repository".to_owned() }
    }

    #[test]
    fn a_failure_is_remembered_for_its_tenant_until_the_time_is_over() {
        let (failures, now) = (RecentFailures::new(KEPT), Instant::now());
        failures.remember_at(&key("alice", "a"), missing(), now);
        let found = failures.find_at(&key("alice", "a"), now + KEPT / 3).unwrap();
        assert_eq!(found.retry_after, Some(KEPT - KEPT / 3));
        assert!(failures.find_at(&key("bob", "a"), now).is_none());
        assert!(failures.find_at(&key("alice", "b"), now).is_none());
        assert!(failures.find_at(&key("alice", "a"), now + KEPT).is_none());
    }

    #[test]
    fn a_tenant_has_a_limit_and_old_failures_are_forgotten() {
        let (failures, now) = (RecentFailures::new(KEPT), Instant::now());
        for index in 0..2 * MAX_PER_TENANT {
            let at = now + Duration::from_millis(index as u64);
            failures.remember_at(&key("mal", &format!("n{index}")), missing(), at);
        }
        failures.remember_at(&key("alice", "a"), missing(), now);
        assert_eq!(lock(&failures.by_owner)[&Some("mal".to_owned())].len(), MAX_PER_TENANT);
        let last = format!("n{}", 2 * MAX_PER_TENANT - 1);
        assert!(failures.find_at(&key("mal", &last), now).is_some());
        assert!(failures.find_at(&key("mal", "n0"), now).is_none());
        failures.remember_at(&key("bob", "a"), missing(), now + 2 * KEPT);
        assert_eq!(lock(&failures.by_owner).len(), 1, "tenants without failures are forgotten");
    }

    #[test]
    fn lack_of_a_slot_is_not_remembered() {
        let failures = RecentFailures::new(KEPT);
        assert_eq!(failures.remember(&key("alice", "a"), FetchError::Busy(2)).retry_after, None);
        assert!(failures.find(&key("alice", "a")).is_none());
    }
}
