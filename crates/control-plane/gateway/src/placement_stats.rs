//! Reports for `/v1/status` and `/v1/lora_adapters`: where adapters are, which part computed their ranks, and
//! what cold starts cost.

use std::collections::HashMap;

use control_protocol::status::{
    BlockMoves, BlockPoolStatus, BlockShare, ColdStartCounts, DeviceStatus, HostMemoryStatus, MemoryStatus,
    SpeculationStatus, StreamedWeightStatus, TierSlotStatus, WorkerPoolStatus, WorkerStatus,
};
use shmproto::message::{
    AdapterIdBytes, AdapterStats, ColdStart, DeviceKind, DraftKind, MemoryAccountStats, ShareStats, Stats,
    Welcome,
};
use types::{AdapterId, TenantId};

/// Name of a cold start mode, as on the executor's command line.
#[must_use]
pub(crate) fn mode(cold_start: ColdStart) -> &'static str {
    match cold_start {
        ColdStart::CpuAssist => "cpu-assist",
        ColdStart::OnDemand => "on-demand",
        ColdStart::Cached => "cached",
    }
}

/// Name of a device kind, as on the executor's command line.
#[must_use]
pub(crate) fn kind(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu => "cpu",
        DeviceKind::Cuda => "cuda",
    }
}

/// Reports the device, its adapter tier, and the copies of adapters to it.
#[must_use]
pub(crate) fn device(stats: &Stats, welcome: Option<&Welcome>) -> DeviceStatus {
    let device = welcome.map(|welcome| &welcome.device);
    DeviceStatus {
        kind: device.map(|device| kind(device.kind).to_owned()),
        name: device.map(|device| device.name.clone()),
        memory_bytes: device.map(|device| device.memory_bytes),
        memory_free_bytes: stats.device_free_bytes,
        group_weight_bytes: device.map(|device| device.group_weight_bytes.clone()).unwrap_or_default(),
        numbers: welcome.map(|welcome| welcome.numbers.clone()),
        bytes: stats.device_bytes,
        budget_bytes: welcome.map(|welcome| welcome.device_budget_bytes),
        cold_start: welcome.map(|welcome| mode(welcome.cold_start).to_owned()),
        emulated_link_bytes_per_s: (stats.link_bytes_per_s > 0).then_some(stats.link_bytes_per_s),
        copied_bytes: stats.copied_bytes,
        copy_ms: millis(stats.copy_us),
    }
}

/// Reports the tiers of the block pool: blocks per tier, copies between tiers, and the tenants with the most
/// device blocks.
#[must_use]
pub(crate) fn memory(stats: &Stats) -> MemoryStatus {
    let memory = &stats.memory;
    let taken = stats.kv_blocks_used + stats.kv_blocks_cached + memory.adapter_blocks;
    let share = |share: &ShareStats| BlockShare {
        tenant: format!("{:.12}", TenantId(share.owner)),
        blocks: share.blocks,
    };
    MemoryStatus {
        block_bytes: memory.block_bytes,
        device: BlockPoolStatus {
            total: stats.kv_blocks_total.into(),
            running: stats.kv_blocks_used.into(),
            history: stats.kv_blocks_cached.into(),
            adapters: memory.adapter_blocks.into(),
            free: stats.kv_blocks_total.saturating_sub(taken).into(),
        },
        host: TierSlotStatus { total: memory.host_blocks_total.into(), used: memory.host_blocks_used.into() },
        disk: TierSlotStatus { total: memory.disk_blocks_total.into(), used: memory.disk_blocks_used.into() },
        blocks: BlockMoves {
            fetched_host: memory.fetched_host_blocks,
            fetched_disk: memory.fetched_disk_blocks,
            prefetched: memory.prefetched_blocks,
            spilled: memory.spilled_blocks,
            evicted: memory.evicted_blocks,
            lost: memory.lost_blocks,
            failed: memory.failed_copies,
        },
        kv_wait_ms: millis(memory.kv_wait_us),
        held: held(memory.held),
        weights: StreamedWeightStatus {
            read_bytes: memory.weights.read_bytes,
            read_ms: millis(memory.weights.read_us),
            waited_ms: millis(memory.weights.waited_us),
            bytes_per_token: memory.weights.read_bytes.checked_div(stats.generated_tokens),
        },
        shares: memory.shares.iter().map(share).collect(),
    }
}

/// Reports the bytes of host memory that an executor uses.
fn held(held: MemoryAccountStats) -> HostMemoryStatus {
    HostMemoryStatus {
        limit_bytes: held.limit_bytes,
        weights_bytes: held.weights_bytes,
        blocks_bytes: held.blocks_bytes,
        adapters_bytes: held.adapters_bytes,
        history_bytes: held.history_bytes,
        workers_bytes: held.workers_bytes,
        clients_bytes: held.clients_bytes,
        drafts_bytes: held.drafts_bytes,
    }
}

/// Reports how often and how long requests waited because their adapter was not on the device.
#[must_use]
pub(crate) fn cold_starts(stats: &Stats) -> ColdStartCounts {
    let load_wait_ms = millis(stats.load_wait_us);
    let mean_load_wait_ms =
        if stats.cold_starts == 0 { 0.0 } else { load_wait_ms / float(stats.cold_starts) };
    ColdStartCounts { count: stats.cold_starts, load_wait_ms, mean_load_wait_ms }
}

/// Reports the drafter, the drafted tokens, and the mean number of accepted tokens per verification. Tokens
/// that were drafted while streamed weights were read are counted separately.
#[must_use]
pub(crate) fn speculation(stats: &Stats) -> SpeculationStatus {
    let of = &stats.speculation;
    let by = match of.kind {
        DraftKind::Nobody => None,
        DraftKind::Ngram => Some("ngram"),
        DraftKind::Model => Some("model"),
        DraftKind::Itself => Some("self"),
    };
    SpeculationStatus {
        by: by.map(str::to_owned),
        adapter_id: (of.kind == DraftKind::Itself).then(|| AdapterId(of.adapter).to_string()),
        verifications: of.verifications,
        drafted_tokens: of.drafted,
        accepted_tokens: of.accepted,
        mean_accepted_tokens: match of.verifications {
            0 => 0.0,
            verifications => float(of.accepted) / float(verifications),
        },
        model_drafted_tokens: of.model_drafted,
        model_accepted_tokens: of.model_accepted,
        drafting_ms: millis(of.drafting_us),
        least_confidence: of.least_confidence.into(),
        ahead_tokens: of.ahead,
        kept_tokens: of.kept,
        hidden_ms: millis(of.hidden_us),
    }
}

/// Reports the connected workers, of `expected` ones. `share` is a worker's part of what all workers
/// computed.
#[must_use]
pub(crate) fn workers(stats: &Stats, expected: u32) -> WorkerPoolStatus {
    let all: u64 = stats.workers.iter().fold(0, |sum, worker| sum.saturating_add(worker.rank_rows));
    let seated = stats.workers.iter().map(|worker| WorkerStatus {
        core: worker.core,
        pid: worker.pid,
        slices: worker.slices,
        rank_rows: worker.rank_rows,
        share: float(worker.rank_rows) / float(all.max(1)),
        taken_back: worker.taken_back,
    });
    WorkerPoolStatus {
        expected,
        lost: stats.workers_lost,
        wait_ms: millis(stats.worker_wait_us),
        seated: seated.collect(),
    }
}

/// Stats of one adapter since it entered the executor's memory; zeros if it is not there.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct PlacementStats {
    /// Bytes of the adapter on the device.
    pub device_bytes: u64,
    /// Requests that arrived while the adapter was not completely on the device.
    pub cold_starts: u64,
    /// Milliseconds that requests waited for the adapter to reach the device.
    pub load_wait_ms: f64,
    /// Rows times ranks, by computing part: the device, the workers, or the executor in place of workers.
    pub rank_rows: [u64; 3],
    /// Verified draft tokens of requests with the adapter.
    pub drafted_tokens: u64,
    /// Draft tokens that verification accepted.
    pub accepted_tokens: u64,
    /// Acceptance probability that one more draft token needed to be worth its row, when last computed; the
    /// maximum over executors.
    pub least_confidence: f32,
}

impl PlacementStats {
    fn add(&mut self, stats: &AdapterStats) {
        self.device_bytes += stats.device_bytes;
        self.cold_starts += stats.cold_starts;
        self.load_wait_ms += millis(stats.load_wait_us);
        self.drafted_tokens += stats.drafted;
        self.accepted_tokens += stats.accepted;
        self.least_confidence = self.least_confidence.max(stats.least_confidence);
        for (own, more) in self.rank_rows.iter_mut().zip(rank_rows(stats)) {
            *own += more;
        }
    }
}

fn rank_rows(stats: &AdapterStats) -> [u64; 3] {
    [stats.rank_rows_device, stats.rank_rows_workers, stats.rank_rows_executor]
}

/// Stats of all reported adapters, by adapter id.
#[derive(Debug)]
pub(crate) struct PlacementReport(HashMap<AdapterIdBytes, PlacementStats>);

impl PlacementReport {
    /// Sums the stats of each adapter over all executors.
    #[must_use]
    pub(crate) fn of<'a>(stats: impl IntoIterator<Item = &'a Stats>) -> Self {
        let mut placed: HashMap<_, PlacementStats> = HashMap::new();
        for adapter in stats.into_iter().flat_map(|stats| &stats.adapters) {
            placed.entry(adapter.adapter).or_default().add(adapter);
        }
        Self(placed)
    }

    #[must_use]
    pub(crate) fn find(&self, adapter: AdapterId) -> PlacementStats {
        self.0.get(&adapter.0).copied().unwrap_or_default()
    }
}

fn millis(us: u64) -> f64 {
    float(us) / 1e3
}

#[expect(clippy::cast_precision_loss, reason = "for people to read; counts stay below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use shmproto::message::WorkerStats;

    use super::*;

    #[test]
    fn before_anything_happened_nothing_is_divided_by_nothing() {
        let stats = Stats { workers: vec![worker(1, 0)], ..Stats::default() };
        assert_eq!(cold_starts(&stats).mean_load_wait_ms, 0.0);
        assert_eq!(workers(&stats, 2).seated[0].share, 0.0);
        assert_eq!(device(&stats, None).emulated_link_bytes_per_s, None);
    }

    #[test]
    fn the_shares_of_all_workers_are_a_whole() {
        let stats = Stats { workers: vec![worker(1, 30), worker(2, 10)], ..Stats::default() };
        let shares: Vec<f64> = workers(&stats, 2).seated.iter().map(|worker| worker.share).collect();
        assert_eq!(shares, [0.75, 0.25]);
    }

    fn worker(core: u32, rank_rows: u64) -> WorkerStats {
        WorkerStats { core, pid: 7, slices: 1, rank_rows, taken_back: 0 }
    }
}
