//! The metric series: one family per metric, one series per combination of labels.
//!
//! A series is an atomic that its holders write without a lock.
//!
//! # Why no library
//!
//! A library could replace only this module and [`super::text`], a small part of the metrics code. Each
//! candidate lacks a required property (examined: `prometheus-client` 0.24, `metrics` 0.24 with
//! `metrics-exporter-prometheus` 0.18):
//!
//! - Series of a removed adapter disappear: [`MetricStore::retain`]. Families of `prometheus-client` cannot
//!   be listed, only queried for known labels. `metrics` forgets series only by idle time, for all metrics of
//!   a kind.
//! - A family is bounded ([`MAX_SERIES`]). Neither library bounds families.
//! - Memory does not grow between scrapes. The exporter of `metrics` keeps every histogram sample until a
//!   scrape or its upkeep.
//! - Counts of the executor or the registry are taken over as a whole: [`Histogram::replace`]. Neither
//!   library can set a histogram; counters of `metrics` are integers, while ours also count seconds.
//! - The text is Prometheus 0.0.4, which request routers parse, in the table's order, and vLLM's names repeat
//!   the same series. `prometheus-client` writes `OpenMetrics`, where a counter's type has another name than
//!   its samples, in the order of a hash table.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use super::table::{Id, MetricKind, TABLE};

/// Maximum number of series per family, above all closed label sets; further series are not shown.
const MAX_SERIES: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct MetricValue(AtomicU64);

impl MetricValue {
    /// Adds `amount`, which may be negative for a gauge.
    pub(crate) fn add(&self, amount: f64) {
        let add = |bits| Some((f64::from_bits(bits) + amount).to_bits());
        // The closure always returns a value, so the update cannot fail.
        let _ = self.0.fetch_update(Relaxed, Relaxed, add);
    }

    pub(crate) fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }

    #[must_use]
    pub(crate) fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

#[derive(Debug)]
pub struct Histogram {
    bounds_s: &'static [f64],
    /// One count per bound, and one for values above all bounds.
    counts: Box<[AtomicU64]>,
    sum_s: MetricValue,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Upper bounds with cumulative counts, ascending.
    pub buckets: Vec<(f64, u64)>,
    /// Total number of values.
    pub count: u64,
    /// Sum of all values, in seconds.
    pub sum_s: f64,
}

impl Histogram {
    fn new(bounds_s: &'static [f64]) -> Self {
        Self {
            bounds_s,
            counts: (0..=bounds_s.len()).map(|_| AtomicU64::new(0)).collect(),
            sum_s: MetricValue::default(),
        }
    }

    pub fn record(&self, time: Duration) {
        self.record_s(time.as_secs_f64());
    }

    fn record_s(&self, seconds: f64) {
        let bucket = self.bounds_s.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum_s.add(seconds);
    }

    /// Replaces the counts: one per bucket, not cumulative, the last for values above all bounds.
    pub fn replace(&self, counts: &[u64], sum_s: f64) {
        for (own, count) in self.counts.iter().zip(counts) {
            own.store(*count, Relaxed);
        }
        self.sum_s.set(sum_s);
    }

    /// Adds counts: one per bucket, not cumulative, the last for values above all bounds.
    pub fn add(&self, counts: impl IntoIterator<Item = u64>, sum: f64) {
        for (own, count) in self.counts.iter().zip(counts) {
            own.fetch_add(count, Relaxed);
        }
        self.sum_s.add(sum);
    }

    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut count = 0;
        let mut buckets = Vec::with_capacity(self.bounds_s.len());
        for (index, bucket) in self.counts.iter().enumerate() {
            count += bucket.load(Relaxed);
            if let Some(bound) = self.bounds_s.get(index) {
                buckets.push((*bound, count));
            }
        }
        Snapshot { buckets, count, sum_s: self.sum_s.get() }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Series {
    Number(Arc<MetricValue>),
    Histogram(Arc<Histogram>),
}

/// Label values, in the order of the metric's labels.
pub(crate) type Labels = Box<[String]>;
pub(crate) type Family = BTreeMap<Labels, Series>;

#[derive(Debug)]
pub(crate) struct MetricStore {
    families: Vec<Mutex<Family>>,
}

impl MetricStore {
    #[must_use]
    pub(crate) fn new() -> Self {
        Self { families: TABLE.iter().map(|_| Mutex::default()).collect() }
    }

    #[must_use]
    pub(crate) fn number(&self, id: Id, labels: &[&str]) -> Arc<MetricValue> {
        match self.series(id, labels) {
            Series::Number(number) => number,
            Series::Histogram(_) => unreachable!("{} is a histogram", id.metric().name),
        }
    }

    #[must_use]
    pub(crate) fn histogram(&self, id: Id, labels: &[&str]) -> Arc<Histogram> {
        match self.series(id, labels) {
            Series::Histogram(histogram) => histogram,
            Series::Number(_) => unreachable!("{} is no histogram", id.metric().name),
        }
    }

    fn series(&self, id: Id, labels: &[&str]) -> Series {
        debug_assert_eq!(labels.len(), id.metric().labels.len(), "labels of {}", id.metric().name);
        let mut family = self.family(id);
        let key: Labels = labels.iter().map(|label| (*label).to_owned()).collect();
        if let Some(series) = family.get(&key) {
            return series.clone();
        }
        let series = match id.metric().kind {
            MetricKind::Counter | MetricKind::Gauge => Series::Number(Arc::default()),
            MetricKind::Histogram(bounds_s) => Series::Histogram(Arc::new(Histogram::new(bounds_s))),
        };
        if family.len() < MAX_SERIES {
            family.insert(key, series.clone());
        }
        series
    }

    /// Removes the series whose labels `keep` rejects; later writes to a removed series have no effect.
    pub(crate) fn retain(&self, id: Id, keep: impl Fn(&[String]) -> bool) {
        self.family(id).retain(|labels, _| keep(labels));
    }

    pub(crate) fn family(&self, id: Id) -> MutexGuard<'_, Family> {
        self.families[id as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MetricStore {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_on_a_bound_is_counted_below_it() {
        let histogram = Histogram::new(&[0.5, 1.0]);
        for seconds in [0.5, 0.75, 1.0, 3.0] {
            histogram.record_s(seconds);
        }
        let expected = Snapshot { buckets: vec![(0.5, 1), (1.0, 3)], count: 4, sum_s: 5.25 };
        assert_eq!(histogram.snapshot(), expected);
    }

    #[test]
    fn equal_labels_are_one_series() {
        let store = MetricStore::new();
        store.number(Id::Errors, &["a"]).add(1.0);
        store.number(Id::Errors, &["a"]).add(2.0);
        store.number(Id::Errors, &["b"]).add(5.0);
        assert!((store.number(Id::Errors, &["a"]).get() - 3.0).abs() < f64::EPSILON);
        store.retain(Id::Errors, |labels| labels[0] == "b");
        assert_eq!(store.family(Id::Errors).len(), 1);
    }

    #[test]
    fn a_family_never_holds_more_than_its_limit() {
        let store = MetricStore::new();
        for index in 0..MAX_SERIES + 10 {
            store.number(Id::Errors, &[&index.to_string()]).add(1.0);
        }
        assert_eq!(store.family(Id::Errors).len(), MAX_SERIES);
    }
}
