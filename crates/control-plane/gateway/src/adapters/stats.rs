//! Counters of the registry, which the metrics endpoint renders.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Upper bounds of the load time's buckets, in seconds; one more bucket counts longer loads.
pub(crate) const LOAD_BOUNDS_S: [f64; 12] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

#[derive(Debug, Default)]
pub(super) struct RegistryCounters {
    loads: AtomicU64,
    failures: AtomicU64,
    pub(super) evictions: AtomicU64,
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    load_us: AtomicU64,
    buckets: [AtomicU64; LOAD_BOUNDS_S.len() + 1],
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct RegistryStats {
    pub loads: u64,
    pub load_failures: u64,
    pub evictions: u64,
    /// Number of requests whose adapter was resident.
    pub hits: u64,
    /// Number of requests that waited for their adapter.
    pub misses: u64,
    /// Total time of all loads, in seconds.
    pub load_s: f64,
    /// Loads in each bucket of [`LOAD_BOUNDS_S`] (not cumulative), then those above the last bound.
    pub load_buckets: [u64; LOAD_BOUNDS_S.len() + 1],
}

impl RegistryStats {
    /// Adds the counts of another registry.
    #[must_use]
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let mut load_buckets = self.load_buckets;
        load_buckets.iter_mut().zip(other.load_buckets).for_each(|(sum, more)| *sum += more);
        Self {
            loads: self.loads + other.loads,
            load_failures: self.load_failures + other.load_failures,
            evictions: self.evictions + other.evictions,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            load_s: self.load_s + other.load_s,
            load_buckets,
        }
    }
}

impl RegistryCounters {
    pub(super) fn loaded(&self, time: Duration) {
        self.loads.fetch_add(1, Relaxed);
        self.load_us.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Relaxed);
        let bucket = LOAD_BOUNDS_S.iter().position(|bound| time.as_secs_f64() <= *bound);
        self.buckets[bucket.unwrap_or(LOAD_BOUNDS_S.len())].fetch_add(1, Relaxed);
    }

    pub(super) fn failed(&self) {
        self.failures.fetch_add(1, Relaxed);
    }

    pub(super) fn read(&self) -> RegistryStats {
        RegistryStats {
            loads: self.loads.load(Relaxed),
            load_failures: self.failures.load(Relaxed),
            evictions: self.evictions.load(Relaxed),
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
            load_s: Duration::from_micros(self.load_us.load(Relaxed)).as_secs_f64(),
            load_buckets: self.buckets.each_ref().map(|bucket| bucket.load(Relaxed)),
        }
    }
}
