//! Metrics of a run, as one line of JSON.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use crate::{
    engine::{EndedRequest, Observation},
    statistics::{mean, quantile},
};

/// Distribution of times in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TimeDistribution {
    /// Mean of the distribution.
    pub mean: f64,
    /// Median of the distribution.
    pub p50: f64,
    /// 95th percentile of the distribution.
    pub p95: f64,
    /// 99th percentile of the distribution.
    pub p99: f64,
}

impl TimeDistribution {
    fn of(values: &[f64]) -> Self {
        let [p50, p95, p99] = [0.5, 0.95, 0.99].map(|q| quantile(values, q));
        Self { mean: mean(values), p50, p95, p99 }
    }
}

/// Parts of the mean time to first token, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FirstTokenSplit {
    /// Time in the admission queue.
    pub queue: f64,
    /// Time of waiting for the adapter.
    pub adapter: f64,
    /// Time of waiting for blocks of lower tiers.
    pub kv: f64,
    /// Time of computing the prompt in shared steps.
    pub compute: f64,
}

/// Metrics of a run. Times are of requests that arrived after the warm-up; counters are of the whole run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimulationReport {
    /// Number of requests that ended.
    pub requests: usize,
    /// Number of measured requests.
    pub measured: usize,
    /// Time to first token.
    pub ttft_ms: TimeDistribution,
    /// Parts of the mean time to first token.
    pub split_ms: FirstTokenSplit,
    /// Time between two tokens of a request.
    pub tpot_ms: TimeDistribution,
    /// Share of prompt tokens found on the device.
    pub device_hits: f64,
    /// Share of prompt tokens copied from lower tiers.
    pub lower_hits: f64,
    /// Share of requests that found their adapter on the device.
    pub adapter_hits: f64,
    /// Number of computed prompt tokens.
    pub prefill_tokens: u64,
    /// Share of all prompt tokens that were computed.
    pub prefill_share: f64,
    /// Mean fraction of the used and cached blocks whose adapter or prefix is not on the device.
    pub invalid_share: f64,
    /// Number of blocks evicted from the device.
    pub evicted_blocks: u64,
    /// Number of evicted blocks that no other tier had.
    pub lost_blocks: u64,
    /// Number of adapters evicted from the device.
    pub evicted_adapters: u64,
    /// Number of adapters copied to the device.
    pub loaded_adapters: u64,
    /// Number of blocks that requests copied from lower tiers.
    pub fetched_blocks: u64,
    /// Number of blocks copied back ahead of need.
    pub prefetched_blocks: u64,
    /// Number of blocks copied to lower tiers.
    pub spilled_blocks: u64,
    /// Share of time in which the link to the device was busy.
    pub link_share: f64,
    /// Mean part of the device that adapters use.
    pub adapter_share: f64,
    /// Mean part of the device that is not free.
    pub used_share: f64,
    /// Share of time with at least 95 % of the required adapters on the device.
    pub covered_share: f64,
    /// Mean part of the device that each tenant uses.
    pub tenant_shares: BTreeMap<u16, f64>,
    /// Mean time to first token of each tenant, in milliseconds.
    pub tenant_ttft_ms: BTreeMap<u16, f64>,
    /// Share of each tenant's prompt tokens found in any tier.
    pub tenant_hits: BTreeMap<u16, f64>,
    /// Number of preempted sequences.
    pub preemptions: u64,
    /// Number of steps that ran.
    pub steps: u64,
    /// Simulated time in seconds.
    pub end_s: f64,
}

impl SimulationReport {
    /// Computes the metrics of an observation; requests that arrived before `warmup` are not measured.
    #[must_use]
    pub fn of(observation: &Observation, warmup: Duration, block_tokens: usize) -> Self {
        let all = &observation.records;
        let measured: Vec<&EndedRequest> = all.iter().filter(|record| record.arrived >= warmup).collect();
        let of = |time: fn(&EndedRequest) -> Duration| -> Vec<f64> {
            measured.iter().map(|record| milliseconds(time(record))).collect()
        };
        let ttft = of(|record| record.ttft);
        let tpot: Vec<f64> = measured
            .iter()
            .filter(|record| record.reply > 1)
            .map(|record| milliseconds(record.decode) / (record.reply - 1) as f64)
            .collect();
        let sum = |value: fn(&EndedRequest) -> usize| {
            measured.iter().map(|record| value(record)).sum::<usize>() as f64
        };
        let prompts = sum(|record| record.prompt).max(1.0);
        let statistics = &observation.statistics;
        let mut by_tenant: BTreeMap<u16, Vec<&EndedRequest>> = BTreeMap::new();
        measured.iter().for_each(|record| by_tenant.entry(record.tenant).or_default().push(record));
        let each_tenant = |of: &dyn Fn(&[&EndedRequest]) -> f64| -> BTreeMap<u16, f64> {
            by_tenant.iter().map(|(tenant, records)| (*tenant, of(records))).collect()
        };
        let known = |records: &[&EndedRequest]| -> f64 {
            let blocks: usize = records.iter().map(|record| record.device_blocks + record.lower_blocks).sum();
            let prompts: usize = records.iter().map(|record| record.prompt).sum();
            (blocks * block_tokens) as f64 / prompts.max(1) as f64
        };
        Self {
            requests: all.len(),
            measured: measured.len(),
            split_ms: FirstTokenSplit {
                queue: mean(&of(|record| record.queue)),
                adapter: mean(&of(|record| record.adapter_wait)),
                kv: mean(&of(|record| record.kv_wait)),
                compute: mean(&of(|record| record.compute)),
            },
            ttft_ms: TimeDistribution::of(&ttft),
            tpot_ms: TimeDistribution::of(&tpot),
            device_hits: sum(|record| record.device_blocks) * block_tokens as f64 / prompts,
            lower_hits: sum(|record| record.lower_blocks) * block_tokens as f64 / prompts,
            adapter_hits: 1.0 - sum(|record| usize::from(record.was_cold)) / measured.len().max(1) as f64,
            prefill_tokens: observation.prefill_tokens,
            prefill_share: observation.prefill_tokens as f64
                / all.iter().map(|record| record.prompt).sum::<usize>().max(1) as f64,
            invalid_share: observation.invalid_share,
            evicted_blocks: statistics.evicted_blocks,
            lost_blocks: statistics.lost_blocks,
            evicted_adapters: statistics.evicted_adapters,
            loaded_adapters: observation.loaded_adapters,
            fetched_blocks: statistics.fetched_blocks.iter().sum(),
            prefetched_blocks: statistics.prefetched_blocks,
            spilled_blocks: statistics.spilled_blocks,
            link_share: observation.link_share,
            adapter_share: observation.adapter_share,
            used_share: observation.used_share,
            covered_share: observation.covered_share,
            tenant_shares: observation.tenant_shares.clone(),
            tenant_ttft_ms: each_tenant(&|records| {
                mean(&records.iter().map(|record| milliseconds(record.ttft)).collect::<Vec<_>>())
            }),
            tenant_hits: each_tenant(&known),
            preemptions: observation.preemptions,
            steps: observation.steps,
            end_s: observation.end.as_secs_f64(),
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
