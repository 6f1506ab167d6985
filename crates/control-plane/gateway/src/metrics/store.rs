//! Where the figures are: one family for each row of the table, one series for each combination of labels.
//!
//! A series is an atomic that is written without a lock by whoever holds it.
//!
//! # Why none of the usual libraries
//!
//! This and [`super::text`] are all that one could take over: some 270 lines of 1,900; the others say what is counted, and
//! when. Each library falls short of something that is promised (looked at: `prometheus-client` 0.24, `metrics` 0.24 with
//! `metrics-exporter-prometheus` 0.18):
//!
//! - An adapter that is gone leaves no figures behind: [`MetricStore::retain`]. The families of the one cannot be listed, only
//!   asked for labels that are known; the other forgets by idle time alone, of everything or nothing of a kind.
//! - A family is bounded ([`MAX_SERIES`]). Neither bounds one.
//! - Between two readings nothing grows. The exporter of the other keeps every sample of a histogram until somebody reads
//!   or tidies up.
//! - What the executor or the registry counted is taken over whole: [`Histogram::replace`]. Neither lets a histogram be
//!   set; counters of the other are whole numbers, and ours count seconds.
//! - The text is that of Prometheus 0.0.4, which request routers parse, in the table's order, and vLLM's names are the
//!   same series written twice. The one writes `OpenMetrics`, where a counter's type is told under another name than its
//!   samples, in the order of a hash table.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use super::table::{Id, MetricKind, TABLE};

/// Most series of a family. Closed sets and the cap on adapters keep below it; beyond it a series is not shown.
const MAX_SERIES: usize = 4096;

/// A number that is set or added to.
#[derive(Debug, Default)]
pub struct MetricValue(AtomicU64);

impl MetricValue {
    /// Adds `amount`, which may be negative for a gauge.
    pub fn add(&self, amount: f64) {
        let add = |bits| Some((f64::from_bits(bits) + amount).to_bits());
        // The closure always gives a value, so this cannot fail.
        let _ = self.0.fetch_update(Relaxed, Relaxed, add);
    }

    /// Replaces the value.
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }

    /// The value.
    #[must_use]
    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

/// Durations, or numbers of things, in buckets.
#[derive(Debug)]
pub struct Histogram {
    bounds_s: &'static [f64],
    /// One for each bound, and one for what is above all of them.
    counts: Box<[AtomicU64]>,
    sum_s: MetricValue,
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Upper bound and how many were at most that, ascending.
    pub buckets: Vec<(f64, u64)>,
    /// How many there were.
    pub count: u64,
    /// All of them together, in seconds.
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

    /// Counts `time`.
    pub fn record(&self, time: Duration) {
        self.record_s(time.as_secs_f64());
    }

    fn record_s(&self, seconds: f64) {
        let bucket = self.bounds_s.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum_s.add(seconds);
    }

    /// Takes over what somebody else counted: each bucket alone, then what is above all bounds.
    pub fn replace(&self, counts: &[u64], sum_s: f64) {
        for (own, count) in self.counts.iter().zip(counts) {
            own.store(*count, Relaxed);
        }
        self.sum_s.set(sum_s);
    }

    /// Counts what somebody else counted since they told last: each bucket alone, then what is above all bounds.
    pub fn add(&self, counts: impl IntoIterator<Item = u64>, sum: f64) {
        for (own, count) in self.counts.iter().zip(counts) {
            own.fetch_add(count, Relaxed);
        }
        self.sum_s.add(sum);
    }

    /// What it holds now.
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

/// What is kept for one combination of labels.
#[derive(Debug, Clone)]
pub enum Series {
    /// Of a counter or gauge.
    Number(Arc<MetricValue>),
    /// Of a histogram.
    Histogram(Arc<Histogram>),
}

/// Values of a row's labels, in the row's order.
pub type Labels = Box<[String]>;
/// The series of one row.
pub type Family = BTreeMap<Labels, Series>;

/// See the module's description.
#[derive(Debug)]
pub struct MetricStore {
    families: Vec<Mutex<Family>>,
}

impl MetricStore {
    /// One empty family for each row of the table.
    #[must_use]
    pub fn new() -> Self {
        Self { families: TABLE.iter().map(|_| Mutex::default()).collect() }
    }

    /// The number of a counter or gauge.
    #[must_use]
    pub fn number(&self, id: Id, labels: &[&str]) -> Arc<MetricValue> {
        match self.series(id, labels) {
            Series::Number(number) => number,
            Series::Histogram(_) => unreachable!("{} is a histogram", id.metric().name),
        }
    }

    /// The buckets of a histogram.
    #[must_use]
    pub fn histogram(&self, id: Id, labels: &[&str]) -> Arc<Histogram> {
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

    /// Takes away the series whose labels `keep` does not want. Who still holds one writes to it unseen.
    pub fn retain(&self, id: Id, keep: impl Fn(&[String]) -> bool) {
        self.family(id).retain(|labels, _| keep(labels));
    }

    /// The series of a row, held while they are looked at.
    pub fn family(&self, id: Id) -> MutexGuard<'_, Family> {
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
