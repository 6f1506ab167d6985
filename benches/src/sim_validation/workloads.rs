//! Five workloads, scaled to the capacity of two cores.

use std::time::Duration;

use simulator::workload::{
    ShareAccounting,
    arrivals::ArrivalHistory,
    popularity::Popularity,
    scenario::{Scenario, WorkloadSpec},
};

use super::deployment::{ExecutorMemory, RANK};

const MIB: u64 = 1 << 20;

const LENGTH: Duration = Duration::from_secs(90);

#[derive(Debug, Clone, Copy)]
pub(super) struct WorkloadCase {
    pub(super) name: &'static str,
    pub(super) recipe: WorkloadSpec,
    pub(super) memory: ExecutorMemory,
}

pub(super) fn cases() -> [WorkloadCase; 5] {
    let chat = WorkloadSpec {
        scenario: Scenario::Chat,
        adapters: 20,
        popularity: Popularity::Zipf(0.9),
        drift: 0.1,
        rank: RANK as u32,
        tenants: 1,
        shares: ShareAccounting::None,
        hostile_per_s: 0.0,
        per_s: 1.6,
        length_divisor: 4.0,
        before: ArrivalHistory::Nothing,
        end: LENGTH,
    };
    let roomy = ExecutorMemory { device: 512 * MIB, host: 0, disk: 0 };
    [
        WorkloadCase { name: "chat", recipe: chat, memory: roomy },
        WorkloadCase {
            name: "translation",
            recipe: WorkloadSpec { scenario: Scenario::Translation, adapters: 50, per_s: 6.0, ..chat },
            memory: roomy,
        },
        WorkloadCase {
            name: "agents, host tier",
            recipe: WorkloadSpec { scenario: Scenario::Agents, per_s: 5.0, ..chat },
            memory: ExecutorMemory { device: 96 * MIB, host: 256 * MIB, disk: 0 },
        },
        WorkloadCase {
            name: "chat beside a hostile scan, host tier",
            recipe: WorkloadSpec { hostile_per_s: 1.0, per_s: 1.2, ..chat },
            memory: ExecutorMemory { device: 96 * MIB, host: 96 * MIB, disk: 0 },
        },
        WorkloadCase {
            name: "chat over 100 adapters, disk tier",
            recipe: WorkloadSpec { adapters: 100, ..chat },
            memory: ExecutorMemory { device: 64 * MIB, host: 0, disk: 1024 * MIB },
        },
    ]
}
