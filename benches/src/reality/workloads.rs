//! Five workloads, scaled down to what two cores serve.

use std::time::Duration;

use simulator::workload::{
    Shares,
    arrivals::Before,
    popularity::Popularity,
    scenario::{Recipe, Scenario},
};

use super::deployment::{Memory, RANK};

const MIB: u64 = 1 << 20;

/// How long requests come.
const LENGTH: Duration = Duration::from_secs(90);

/// A workload, and what it is served with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) recipe: Recipe,
    pub(super) memory: Memory,
}

/// All of them.
pub(super) fn cases() -> [Case; 5] {
    let chat = Recipe {
        scenario: Scenario::Chat,
        adapters: 20,
        popularity: Popularity::Zipf(0.9),
        drift: 0.1,
        rank: RANK as u32,
        tenants: 1,
        shares: Shares::None,
        hostile_per_s: 0.0,
        per_s: 1.6,
        length_divisor: 4.0,
        before: Before::Nothing,
        end: LENGTH,
    };
    let roomy = Memory { device: 512 * MIB, host: 0, disk: 0 };
    [
        Case { name: "chat", recipe: chat, memory: roomy },
        Case {
            name: "translation",
            recipe: Recipe { scenario: Scenario::Translation, adapters: 50, per_s: 6.0, ..chat },
            memory: roomy,
        },
        Case {
            name: "agents, host tier",
            recipe: Recipe { scenario: Scenario::Agents, per_s: 5.0, ..chat },
            memory: Memory { device: 96 * MIB, host: 256 * MIB, disk: 0 },
        },
        Case {
            name: "chat beside a hostile scan, host tier",
            recipe: Recipe { hostile_per_s: 1.0, per_s: 1.2, ..chat },
            memory: Memory { device: 96 * MIB, host: 96 * MIB, disk: 0 },
        },
        Case {
            name: "chat over 100 adapters, disk tier",
            recipe: Recipe { adapters: 100, ..chat },
            memory: Memory { device: 64 * MIB, host: 0, disk: 1024 * MIB },
        },
    ]
}
