//! Records the observations of a run.

use std::{collections::BTreeMap, time::Duration};

use kv_cache::{BlockCounts, Cache, Statistics};

use super::{sequence::SimSequence, tiers::Tiers};

/// Number of samples between two scans of all nodes.
const LOOK_EVERY: u64 = 10;

/// Timing and cache hits of an ended request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EndedRequest {
    /// Index of the request's adapter.
    pub adapter: usize,
    /// Number of the request's tenant.
    pub tenant: u16,
    /// Index of the request's conversation.
    pub conversation: usize,
    /// Turn within the conversation, from 0.
    pub turn: usize,
    /// Arrival time of the request.
    pub arrived: Duration,
    /// Time from arrival to first token: the sum of the next four fields.
    pub ttft: Duration,
    /// Time in the admission queue.
    pub queue: Duration,
    /// Time of waiting for the adapter.
    pub adapter_wait: Duration,
    /// Time of waiting for blocks of lower tiers.
    pub kv_wait: Duration,
    /// Time from the first run to the first token.
    pub compute: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
    /// Number of tokens of the prompt.
    pub prompt: usize,
    /// Number of generated tokens.
    pub reply: usize,
    /// Number of prompt blocks found on the device.
    pub device_blocks: usize,
    /// Number of prompt blocks copied from lower tiers.
    pub lower_blocks: usize,
    /// Whether the request waited for its adapter.
    pub was_cold: bool,
}

/// State of the cache at one time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheSample {
    /// Time at which the sample was taken.
    pub at: Duration,
    /// Numbers of device blocks by content.
    pub counts: BlockCounts,
    /// Numbers of running and of waiting sequences.
    pub sequences: (usize, usize),
    /// Number of adapters on the device: `Now`.
    pub adapters: f64,
    /// Expected number of adapters that batches use: `Low`.
    pub required: f64,
}

/// All observations of a run.
#[derive(Debug, Clone)]
pub struct Observation {
    /// All requests in the order of their ends.
    pub records: Vec<EndedRequest>,
    /// Samples every 100 ms, if kept.
    pub series: Vec<CacheSample>,
    /// Counters of the simulated cache.
    pub statistics: Statistics,
    /// Number of computed prompt tokens, including recomputed ones.
    pub prefill_tokens: u64,
    /// Number of steps that ran.
    pub steps: u64,
    /// Number of preempted sequences.
    pub preemptions: u64,
    /// Number of adapters copied to the device.
    pub loaded_adapters: u64,
    /// Mean fraction of the used and cached blocks whose adapter or prefix is not on the device.
    pub invalid_share: f64,
    /// Mean fraction of the device's blocks that each tenant uses.
    pub tenant_shares: BTreeMap<u16, f64>,
    /// Mean part of the device that adapters use.
    pub adapter_share: f64,
    /// Mean part of the device that is not free.
    pub used_share: f64,
    /// Share of samples with at least 95 % of the required adapters on the device.
    pub covered_share: f64,
    /// Share of time in which the link to the device was busy.
    pub link_share: f64,
    /// Time at which the last request ended.
    pub end: Duration,
}

#[derive(Debug)]
pub(super) struct Observer {
    keeps_series: bool,
    records: Vec<EndedRequest>,
    series: Vec<CacheSample>,
    pub(super) prefill_tokens: u64,
    pub(super) steps: u64,
    pub(super) preemptions: u64,
    samples: u64,
    looks: u64,
    invalid: f64,
    shares: BTreeMap<u16, f64>,
    adapter_blocks: f64,
    used_blocks: f64,
    covered: u64,
}

impl Observer {
    pub(super) fn new(keeps_series: bool) -> Self {
        Self {
            keeps_series,
            records: Vec::new(),
            series: Vec::new(),
            prefill_tokens: 0,
            steps: 0,
            preemptions: 0,
            samples: 0,
            looks: 0,
            invalid: 0.0,
            shares: BTreeMap::new(),
            adapter_blocks: 0.0,
            used_blocks: 0.0,
            covered: 0,
        }
    }

    pub(super) fn note_end(&mut self, sequence: &SimSequence, tenant: u16, now: Duration) {
        let times = sequence.times;
        let (first, entered) = (times.first_token.unwrap_or(now), times.entered.unwrap_or(now));
        let (ttft, compute) = (first - times.arrived, first - entered);
        let found = sequence.hits.unwrap_or_default();
        self.records.push(EndedRequest {
            adapter: sequence.adapter,
            tenant,
            conversation: sequence.origin.conversation,
            turn: sequence.origin.turn,
            arrived: times.arrived,
            ttft,
            queue: ttft.saturating_sub(compute + times.adapter_wait + times.kv_wait),
            adapter_wait: times.adapter_wait,
            kv_wait: times.kv_wait,
            compute,
            decode: now - first,
            prompt: sequence.prompt,
            reply: sequence.generated(),
            device_blocks: found.on_device,
            lower_blocks: found.below,
            was_cold: sequence.was_cold,
        });
    }

    pub(super) fn sample(&mut self, cache: &Cache, at: Duration, sequences: (usize, usize)) {
        let (counts, demand) = (cache.counts(), cache.adapter_demand());
        self.samples += 1;
        self.adapter_blocks += counts.adapters as f64;
        self.used_blocks += (counts.total - counts.free) as f64;
        self.covered += u64::from(demand.now >= demand.required * 0.95);
        if self.samples % LOOK_EVERY == 1 {
            self.looks += 1;
            self.invalid += cache.invalid_blocks() as f64 / (counts.cached + counts.used).max(1) as f64;
            for (tenant, blocks) in cache.shares() {
                let tenant = u16::from_le_bytes([tenant.0[0], tenant.0[1]]) - 1;
                *self.shares.entry(tenant).or_default() += f64::from(blocks) / counts.total as f64;
            }
        }
        if self.keeps_series {
            let (adapters, required) = (demand.now, demand.required);
            self.series.push(CacheSample { at, counts, sequences, adapters, required });
        }
    }

    pub(super) fn finish(self, cache: &Cache, tiers: &Tiers, end: Duration) -> Observation {
        let (samples, looks) = (self.samples.max(1) as f64, self.looks.max(1) as f64);
        let device = samples * cache.counts().total as f64;
        Observation {
            records: self.records,
            series: self.series,
            statistics: cache.statistics(),
            prefill_tokens: self.prefill_tokens,
            steps: self.steps,
            preemptions: self.preemptions,
            loaded_adapters: tiers.loaded_adapters,
            invalid_share: self.invalid / looks,
            tenant_shares: self.shares.into_iter().map(|(tenant, sum)| (tenant, sum / looks)).collect(),
            adapter_share: self.adapter_blocks / device,
            used_share: self.used_blocks / device,
            covered_share: self.covered as f64 / samples,
            link_share: tiers.busy().as_secs_f64() / end.as_secs_f64().max(1e-9),
            end,
        }
    }
}
