//! Runs small fleets with injected faults and checks the invariants.

use std::io::Write;

use clap::Args;
use serde_json::json;

use super::{CommandError, print, side_by_side};
use crate::fleet::fault_scenario::{self, ScenarioResult};

/// Runs fault scenarios in which executors fail, messages are lost and clocks jump, and checks invariants.
#[derive(Debug, Args)]
pub(super) struct FaultScenarios {
    /// First of the seeds.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of seeds. A release is tested with 2,000,000.
    #[arg(long, default_value_t = 20_000)]
    seeds: u64,
}

/// Number of scenarios that one thread takes at a time.
const AT_ONCE: u64 = 500;

impl FaultScenarios {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let end = self.seed.saturating_add(self.seeds);
        let parts: Vec<u64> = (self.seed..end).step_by(AT_ONCE as usize).collect();
        let sums = side_by_side::all(&parts, |&first| {
            let mut sum = ScenarioResult::default();
            for seed in first..end.min(first + AT_ONCE) {
                add(&mut sum, &fault_scenario::run_scenario(seed)?);
            }
            Ok(sum)
        })?;
        let mut all = ScenarioResult::default();
        sums.iter().for_each(|sum| add(&mut all, sum));
        print(out, &json!({ "seed": self.seed, "worlds": self.seeds, "sum": all, "broken": 0 }))
    }
}

fn add(sum: &mut ScenarioResult, world: &ScenarioResult) {
    sum.requests += world.requests;
    sum.answered += world.answered;
    sum.sent_again += world.sent_again;
    sum.happenings += world.happenings;
    sum.turns += world.turns;
    // Summing in order gives the same scenarios the same digest.
    sum.digest = sum.digest.rotate_left(5) ^ world.digest;
}
