//! Repetition counts of random tests.
//!
//! By default a test covers each of its cases once; more repetitions find rare failures. An environment
//! variable of the same name sets each count, and `scripts/test --long` sets those for a release.

use std::env;

/// A count that an environment variable may set.
#[derive(Debug, Clone, Copy)]
pub struct RepeatCount {
    variable: &'static str,
    default: u64,
}

impl RepeatCount {
    const fn new(variable: &'static str, default: u64) -> Self {
        Self { variable, default }
    }

    /// Returns the count.
    ///
    /// # Panics
    /// If the variable is not a number.
    #[must_use]
    pub fn number(self) -> u64 {
        let number = |text: String| text.parse().unwrap_or_else(|_| panic!("{} is no number", self.variable));
        env::var(self.variable).map_or(self.default, number)
    }

    /// Returns the count as a `usize`.
    ///
    /// # Panics
    /// Like [`Self::number`].
    #[must_use]
    pub fn count(self) -> usize {
        usize::try_from(self.number()).expect("few enough for memory")
    }
}

/// Seed of random numbers.
pub const SEED: RepeatCount = RepeatCount::new("HOLOBIONT_SEED", 1);
/// Kills of processes under load: at every failpoint, and at some random times.
pub const KILLS: RepeatCount = RepeatCount::new("HOLOBIONT_KILLS", 100);
/// Kills of one of two executors under load.
pub const EXECUTOR_KILLS: RepeatCount = RepeatCount::new("HOLOBIONT_EXECUTOR_KILLS", 40);
/// Faults of a fleet under load.
pub const FLEET_FAULTS: RepeatCount = RepeatCount::new("HOLOBIONT_FLEET_FAULTS", 8);
/// Loads, replacements and unloads under load.
pub const CHURN: RepeatCount = RepeatCount::new("HOLOBIONT_CHURN", 300);
/// Workers that are killed or stopped.
pub const WORKER_FAULTS: RepeatCount = RepeatCount::new("HOLOBIONT_WORKER_FAULTS", 60);
/// Split clients that are killed or stopped, and as many of their executors: each at every failpoint.
pub const SPLIT_FAULTS: RepeatCount = RepeatCount::new("HOLOBIONT_SPLIT_FAULTS", 8);
/// Kills during one fine-tuning job: each of its processes once.
pub const TUNE_KILLS: RepeatCount = RepeatCount::new("HOLOBIONT_TUNE_KILLS", 4);
/// Tenants that train and sample at once.
pub const TENANTS: RepeatCount = RepeatCount::new("HOLOBIONT_TENANTS", 4);
/// Seconds in which a process is killed every 200 ms.
pub const STORM_S: RepeatCount = RepeatCount::new("HOLOBIONT_STORM_S", 10);
/// Seconds in which many clients come and go. From five minutes on, memory must be flat too.
pub const SOAK_S: RepeatCount = RepeatCount::new("HOLOBIONT_SOAK_S", 15);
/// Layers of the default model of deployments.
pub const LAYERS: RepeatCount = RepeatCount::new("HOLOBIONT_LAYERS", 6);
/// Pairs of prompts to each model that are answered with and without draft tokens.
pub const SPECULATION: RepeatCount = RepeatCount::new("HOLOBIONT_SPECULATION", 1);
/// Kills of an executor that verifies draft tokens, each during an answer.
pub const DRAFTED_DEATHS: RepeatCount = RepeatCount::new("HOLOBIONT_DRAFTED_DEATHS", 2);
/// Answers whose receipts are verified.
pub const RECEIPTS: RepeatCount = RepeatCount::new("HOLOBIONT_RECEIPTS", 200);
/// Prompts to each model for which the answers of all routes are compared.
pub const PROMPTS: RepeatCount = RepeatCount::new("HOLOBIONT_PROMPTS", 2);
/// Tokens of each of those answers.
pub const ANSWER: RepeatCount = RepeatCount::new("HOLOBIONT_ANSWER", 8);
/// Tokens of a split client's long context.
pub const CONTEXT: RepeatCount = RepeatCount::new("HOLOBIONT_CONTEXT", 1200);
