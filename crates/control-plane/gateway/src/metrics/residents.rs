//! Metrics of registered adapters, the fleet and training: tiers, names, loads, evictions and jobs.

use std::collections::{BTreeMap, HashMap};

use shmproto::message::AdapterIdBytes;

use super::{GatewayMetrics, ReportedBase, table::Id};
use crate::{
    adapters::{Registry, RegistryStats, Tier, remote::stats::FetchOutcome, uri::UriScheme},
    batches::Batches,
    training::Training,
};

const GENERATION_CHARS: usize = 12;

struct MetricAdapter {
    generation: String,
    id: AdapterIdBytes,
    tier: &'static str,
    rank: u32,
    pinned: &'static str,
}

fn residents(bases: &[ReportedBase<'_>]) -> BTreeMap<String, MetricAdapter> {
    bases.iter().flat_map(|base| residents_of(base.registry)).collect()
}

fn residents_of(registry: &Registry) -> Vec<(String, MetricAdapter)> {
    let entries = registry.entries();
    let named = entries.iter().map(|(name, entry)| {
        let resident = MetricAdapter {
            generation: entry.record.generation.to_string(),
            id: entry.id().0,
            tier: registry.tier(entry).name(),
            rank: entry.record.rank,
            pinned: if entry.is_pinned() { "true" } else { "false" },
        };
        (name.clone(), resident)
    });
    named.collect()
}

impl GatewayMetrics {
    /// Updates the metrics of registered adapters; returns the names of each adapter.
    pub(super) fn refresh_residents(
        &self,
        bases: &[ReportedBase<'_>],
    ) -> HashMap<AdapterIdBytes, Vec<String>> {
        let residents = residents(bases);
        let count = |is: &dyn Fn(&MetricAdapter) -> bool| {
            let count = residents.values().filter(|resident| is(resident)).count();
            f64::from(u32::try_from(count).unwrap_or(u32::MAX))
        };
        let set = |id, labels: &[&str], value| self.store.number(id, labels).set(value);
        set(Id::AdaptersRegistered, &[], count(&|_| true));
        set(Id::AdaptersPinned, &[], count(&|resident| resident.pinned == "true"));
        for tier in Tier::EACH.map(Tier::name) {
            set(Id::Adapters, &[tier], count(&|resident| resident.tier == tier));
        }
        self.adapters.retain(&self.store, |name| residents.contains_key(name));
        self.show(&residents);
        let mut names: HashMap<AdapterIdBytes, Vec<String>> = HashMap::new();
        for (name, resident) in residents {
            names.entry(resident.id).or_default().push(name);
        }
        names
    }

    /// Updates the metrics of loads, evictions and look-ups.
    pub(super) fn refresh_loads(&self, bases: &[ReportedBase<'_>]) {
        let each = bases.iter().map(|base| base.registry.stats());
        let stats = each.fold(RegistryStats::default(), |sum, more| sum.plus(&more));
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let set = |id, labels: &[&str], count: u64| self.store.number(id, labels).set(count as f64);
        set(Id::AdapterLoads, &["loaded"], stats.loads);
        set(Id::AdapterLoads, &["failed"], stats.load_failures);
        set(Id::AdapterEvictions, &[], stats.evictions);
        set(Id::AdapterLookups, &["hit"], stats.hits);
        set(Id::AdapterLookups, &["miss"], stats.misses);
        self.store.histogram(Id::AdapterLoadTime, &[]).replace(&stats.load_buckets, stats.load_s);
        self.refresh_fetches(bases);
        bases.iter().for_each(|base| self.refresh_fleet(base.registry));
    }

    /// Updates the metrics of fetches by URI.
    fn refresh_fetches(&self, bases: &[ReportedBase<'_>]) {
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let set = |id, labels: &[&str], count: u64| self.store.number(id, labels).set(count as f64);
        let all: Vec<_> = bases.iter().flat_map(|base| base.registry.fetch_stats()).collect();
        for scheme in UriScheme::EACH {
            let of_scheme = all.iter().filter(|stats| stats.scheme == scheme);
            for outcome in FetchOutcome::EACH {
                let count = of_scheme.clone().map(|stats| stats.outcomes[outcome as usize].1).sum();
                set(Id::UriFetches, &[scheme.name(), outcome.name()], count);
            }
            set(Id::UriFetchedBytes, &[scheme.name()], of_scheme.map(|stats| stats.bytes).sum());
        }
    }

    /// Updates the metrics of the shared registry and the adapter store.
    fn refresh_fleet(&self, registry: &Registry) {
        if let Some(freshness) = registry.freshness() {
            self.store.number(Id::RegistryAge, &[]).set(freshness.age.as_secs_f64());
        }
        let Some(stats) = registry.bucket_status() else { return };
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let set = |id, labels: &[&str], count: u64| self.store.number(id, labels).set(count as f64);
        set(Id::StoreFetches, &["fetched"], stats.fetched);
        set(Id::StoreFetches, &["failed"], stats.failed);
        set(Id::StoreDamaged, &[], stats.damaged);
        set(Id::StoreCacheBytes, &[], stats.cached_bytes);
        set(Id::StoreEvictions, &[], stats.evicted);
    }

    pub(super) fn refresh_training(&self, training: &Training) {
        let stats = training.stats();
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let set = |id, labels: &[&str], count: u64| self.store.number(id, labels).set(count as f64);
        for (state, count) in stats.unfinished {
            set(Id::Jobs, &[state], count);
        }
        for (outcome, count) in stats.ended {
            set(Id::JobsEnded, &[outcome], count);
        }
        set(Id::TrainersLost, &[], stats.trainers_lost);
        set(Id::TrainingSteps, &[], stats.steps);
        set(Id::TrainedTokens, &[], stats.tokens);
    }

    pub(super) fn refresh_batches(&self, batches: &Batches) {
        let stats = batches.stats();
        #[expect(clippy::cast_precision_loss, reason = "counts stay below 2^53")]
        let set = |id, labels: &[&str], count: u64| self.store.number(id, labels).set(count as f64);
        for (state, count) in stats.unfinished {
            set(Id::Batches, &[state], count);
        }
        for (outcome, count) in stats.ended {
            set(Id::BatchesEnded, &[outcome], count);
        }
        for (outcome, count) in stats.lines {
            set(Id::BatchLines, &[outcome], count);
        }
        set(Id::BatchLinesRunning, &[], stats.lines_running);
        set(Id::BatchLinesPreempted, &[], stats.lines_preempted);
    }

    /// Writes one info series per adapter with a label, and removes outdated ones.
    fn show(&self, residents: &BTreeMap<String, MetricAdapter>) {
        let shown: Vec<[String; 5]> = self
            .adapters
            .choose(residents.keys().map(String::as_str))
            .into_iter()
            .filter_map(|name| residents.get_key_value(name))
            .map(|(name, resident)| {
                let generation = resident.generation.chars().take(GENERATION_CHARS).collect();
                let (tier, pinned) = (resident.tier.to_owned(), resident.pinned.to_owned());
                [name.clone(), generation, tier, resident.rank.to_string(), pinned]
            })
            .collect();
        self.store.retain(Id::AdapterLoaded, |labels| shown.iter().any(|shown| shown == labels));
        for labels in &shown {
            self.store.number(Id::AdapterLoaded, &labels.each_ref().map(String::as_str)).set(1.0);
        }
    }
}
