//! Metrics by adapter, for a bounded number of adapters.
//!
//! The first `--max-adapter-labels` adapters in use get their own labels. All others share `other` until an
//! adapter with a label is unloaded and its series are removed. The base model is `base`. An adapter named
//! `base` or `other` counts under `other`, so both labels stay unambiguous.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    store::{Histogram, MetricStore, MetricValue},
    table::Id,
};

pub(crate) const BASE: &str = "base";
/// Label of adapters beyond the limit.
pub(crate) const OTHER: &str = "other";

/// Metrics whose first label is `adapter`.
const BY_ADAPTER: [Id; 8] = [
    Id::AdapterTimeToFirstToken,
    Id::AdapterTimePerOutputToken,
    Id::AdapterQueueTime,
    Id::AdapterRequestDuration,
    Id::AdapterPromptTokens,
    Id::AdapterGeneratedTokens,
    Id::AdapterCachedTokens,
    Id::AdapterRankRows,
];

#[derive(Debug)]
pub(crate) struct AdapterMetrics {
    /// Adapter name, [`BASE`] or [`OTHER`].
    pub(super) label: String,
    pub(super) first_token: Arc<Histogram>,
    pub(super) per_token: Arc<Histogram>,
    pub(super) queue: Arc<Histogram>,
    pub(super) duration: Arc<Histogram>,
    pub(super) prompt_tokens: Arc<MetricValue>,
    pub(super) generated_tokens: Arc<MetricValue>,
    pub(super) cached_tokens: Arc<MetricValue>,
}

impl AdapterMetrics {
    fn new(store: &MetricStore, name: &str) -> Arc<Self> {
        let label = [name];
        Arc::new(Self {
            label: name.to_owned(),
            first_token: store.histogram(Id::AdapterTimeToFirstToken, &label),
            per_token: store.histogram(Id::AdapterTimePerOutputToken, &label),
            queue: store.histogram(Id::AdapterQueueTime, &label),
            duration: store.histogram(Id::AdapterRequestDuration, &label),
            prompt_tokens: store.number(Id::AdapterPromptTokens, &label),
            generated_tokens: store.number(Id::AdapterGeneratedTokens, &label),
            cached_tokens: store.number(Id::AdapterCachedTokens, &label),
        })
    }
}

/// The adapters that have labels.
#[derive(Debug)]
pub(super) struct AdapterLabels {
    /// Maximum number of entries in `shown`.
    cap: usize,
    base: Arc<AdapterMetrics>,
    /// Each entry is created on first use, so that unused adapters have no series.
    shown: Mutex<BTreeMap<String, Arc<AdapterMetrics>>>,
}

impl AdapterLabels {
    pub(super) fn new(store: &MetricStore, cap: usize) -> Self {
        Self { cap, base: AdapterMetrics::new(store, BASE), shown: Mutex::default() }
    }

    /// Returns the series of `adapter`; `None` is the base model.
    pub(super) fn of(&self, store: &MetricStore, adapter: Option<&str>) -> Arc<AdapterMetrics> {
        let Some(name) = adapter else {
            return Arc::clone(&self.base);
        };
        let mut shown = self.shown();
        if let Some(metrics) = shown.get(name) {
            return Arc::clone(metrics);
        }
        if [BASE, OTHER].contains(&name) || shown.len() >= self.cap {
            return AdapterMetrics::new(store, OTHER);
        }
        let metrics = AdapterMetrics::new(store, name);
        shown.insert(name.to_owned(), Arc::clone(&metrics));
        metrics
    }

    pub(super) fn have(&self, name: &str) -> bool {
        self.shown().contains_key(name)
    }

    /// Removes the labels of adapters that are neither registered nor in use.
    pub(super) fn retain(&self, store: &MetricStore, registered: impl Fn(&str) -> bool) {
        let mut shown = self.shown();
        let before = shown.len();
        shown.retain(|name, metrics| registered(name) || Arc::strong_count(metrics) > 1);
        if shown.len() < before {
            let known = |label: &str| label == BASE || label == OTHER || shown.contains_key(label);
            for id in BY_ADAPTER {
                store.retain(id, |labels| labels.first().is_some_and(|label| known(label)));
            }
        }
    }

    /// Returns at most `cap` of `names`, those with labels first.
    pub(super) fn choose<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
        let shown = self.shown();
        let (mut first, rest): (Vec<_>, Vec<_>) = names.partition(|name| shown.contains_key(*name));
        first.extend(rest);
        first.truncate(self.cap);
        first
    }

    fn shown(&self) -> MutexGuard<'_, BTreeMap<String, Arc<AdapterMetrics>>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(store: &MetricStore) -> Vec<String> {
        store.family(Id::AdapterPromptTokens).keys().map(|labels| labels[0].clone()).collect()
    }

    #[test]
    fn adapters_beyond_the_cap_share_one_label_until_one_is_unloaded() {
        let store = MetricStore::new();
        let adapters = AdapterLabels::new(&store, 2);
        for name in ["a", "b", "c", "d", "a"] {
            adapters.of(&store, Some(name)).prompt_tokens.add(1.0);
        }
        assert_eq!(labels(&store), ["a", "b", "base", "other"]);
        adapters.retain(&store, |name| name != "a");
        adapters.of(&store, Some("d")).prompt_tokens.add(1.0);
        assert_eq!(labels(&store), ["b", "base", "d", "other"]);
    }

    #[test]
    fn an_adapter_called_base_is_not_counted_as_the_base() {
        let store = MetricStore::new();
        let adapters = AdapterLabels::new(&store, 8);
        adapters.of(&store, Some("base")).prompt_tokens.add(1.0);
        adapters.of(&store, None).prompt_tokens.add(5.0);
        assert!((store.number(Id::AdapterPromptTokens, &["base"]).get() - 5.0).abs() < f64::EPSILON);
        assert!((store.number(Id::AdapterPromptTokens, &["other"]).get() - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn figures_in_use_stay_when_their_adapter_is_unloaded() {
        let store = MetricStore::new();
        let adapters = AdapterLabels::new(&store, 8);
        let held = adapters.of(&store, Some("a"));
        adapters.retain(&store, |_| false);
        assert_eq!(labels(&store), ["a", "base"]);
        drop(held);
        adapters.retain(&store, |_| false);
        assert_eq!(labels(&store), ["base"]);
    }
}
