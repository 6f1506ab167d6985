//! The text of reports, which programs of operators read.

use shmproto::{
    layer::control::SessionStats,
    message::{
        DeviceFacts, DeviceKind, DraftKind, LayerRoute, LayerSession, LayerStats, MemoryAccountStats,
        MemoryStats, ShareStats, SpeculationStats, TenantUse, WeightStats, WorkerStats,
    },
};

use super::*;

fn memory() -> MemoryStats {
    MemoryStats {
        block_bytes: 7,
        adapter_blocks: 8,
        host_blocks_total: 9,
        host_blocks_used: 10,
        disk_blocks_total: 11,
        disk_blocks_used: 12,
        fetched_host_blocks: 13,
        fetched_disk_blocks: 14,
        prefetched_blocks: 15,
        spilled_blocks: 16,
        evicted_blocks: 17,
        lost_blocks: 18,
        failed_copies: 19,
        kv_wait_us: 20,
        adapters_required: 0.0,
        shares: vec![ShareStats { owner: [1; 32], blocks: 21 }],
        held: MemoryAccountStats {
            limit_bytes: 22,
            weights_bytes: 23,
            blocks_bytes: 24,
            adapters_bytes: 25,
            history_bytes: 26,
            workers_bytes: 27,
            clients_bytes: 28,
            drafts_bytes: 29,
        },
        weights: WeightStats { read_bytes: 300, read_us: 31, waited_us: 32 },
    }
}

fn speculation() -> SpeculationStats {
    SpeculationStats {
        kind: DraftKind::Itself,
        adapter: [2; 32],
        verifications: 33,
        drafted: 34,
        accepted: 35,
        accepted_counts: [0; 7],
        model_drafted: 36,
        model_accepted: 37,
        drafting_us: 38,
        least_confidence: 0.1,
        ahead: 39,
        kept: 40,
        hidden_us: 41,
    }
}

fn layers() -> LayerStats {
    let used = SessionStats {
        calls: 42,
        refused: 43,
        rows: [44, 45, 46, 47, 48],
        bytes_in: 49,
        bytes_out: 50,
        wait_us: 51,
        compute_us: 52,
        batch_rows: 53,
    };
    let session = LayerSession {
        session: 54,
        tenant: "acme".to_owned(),
        name: "trainer".to_owned(),
        masking: "off".to_owned(),
        route: LayerRoute::Tls,
        used: used.clone(),
        waiting_rows: 55,
        slab_bytes: 56,
    };
    let tenant = TenantUse { tenant: "acme".to_owned(), used: used.clone(), waiting_rows: 57 };
    LayerStats {
        open: 58,
        refused: 59,
        broken: 60,
        batches: 61,
        joined_rows: 62,
        used,
        tenants: vec![tenant],
        sessions: vec![session],
    }
}

fn report() -> LastStats {
    LastStats::of(Arc::new(Stats {
        running: 1,
        waiting: 2,
        kv_blocks_total: 300,
        kv_blocks_used: 4,
        kv_blocks_cached: 5,
        adapter_bytes: 6,
        memory: memory(),
        generated_tokens: 3,
        device_free_bytes: 63,
        device_bytes: 64,
        cold_starts: 65,
        load_wait_us: 66,
        worker_wait_us: 67,
        copied_bytes: 68,
        copy_us: 69,
        link_bytes_per_s: 70,
        workers_lost: 71,
        speculation: speculation(),
        workers: vec![WorkerStats { core: 72, pid: 73, slices: 74, rank_rows: 75, taken_back: 76 }],
        layers: layers(),
        ..Stats::default()
    }))
}

/// Reports of an executor with every field set, of an executor without a report, and of two executors.
const GOLDEN: &str = include_str!("status.jsonl");

#[test]
fn the_report_keeps_its_text_and_a_reader_gets_every_field_back() {
    let device = DeviceFacts {
        kind: DeviceKind::Cuda,
        name: "A GPU".to_owned(),
        memory_bytes: 77,
        group_weight_bytes: vec![5, 7],
    };
    let welcome = Welcome { device, ..crate::executor::tests::welcome() };
    let reports = [
        executor_stats(&report(), Some(&welcome), 78),
        executor_stats(&LastStats::default(), None, 0),
        sums(&[report(), report()]),
    ];
    assert_eq!(GOLDEN.lines().count(), reports.len());
    for (golden, report) in GOLDEN.lines().zip(&reports) {
        assert_eq!(serde_json::to_string(report).unwrap(), golden);
        let value = serde_json::to_value(report).unwrap();
        assert_eq!(serde_json::from_value::<ExecutorStats>(value).unwrap(), *report);
    }
}
