//! How often tests repeat what chance decides.
//!
//! Once through everything that a test is for is the default, and more of the same finds what is rare: each number can be
//! set by an environment variable of its name, and `scripts/test --long` sets those that a release is tested with.

use std::env;

/// A number that an environment variable may set.
#[derive(Debug, Clone, Copy)]
pub struct RepeatCount {
    variable: &'static str,
    default: u64,
}

impl RepeatCount {
    const fn new(variable: &'static str, default: u64) -> Self {
        Self { variable, default }
    }

    /// The number.
    ///
    /// # Panics
    /// If the variable holds none.
    #[must_use]
    pub fn number(self) -> u64 {
        let number = |text: String| text.parse().unwrap_or_else(|_| panic!("{} is no number", self.variable));
        env::var(self.variable).map_or(self.default, number)
    }

    /// The number, of things in memory.
    ///
    /// # Panics
    /// As [`Self::number`].
    #[must_use]
    pub fn count(self) -> usize {
        usize::try_from(self.number()).expect("few enough for memory")
    }
}

/// Which random numbers.
pub const SEED: RepeatCount = RepeatCount::new("HOLOBIONT_SEED", 1);
/// Deaths of processes under load: at every named place, and at some of no name.
pub const KILLS: RepeatCount = RepeatCount::new("HOLOBIONT_KILLS", 100);
/// Deaths of one of two executors under load.
pub const EXECUTOR_KILLS: RepeatCount = RepeatCount::new("HOLOBIONT_EXECUTOR_KILLS", 40);
/// Things that fail of a fleet under load.
pub const FLEET_FAULTS: RepeatCount = RepeatCount::new("HOLOBIONT_FLEET_FAULTS", 8);
/// Loads, replacements and unloads under load.
pub const CHURN: RepeatCount = RepeatCount::new("HOLOBIONT_CHURN", 300);
/// Workers that are killed or stopped.
pub const WORKER_FAULTS: RepeatCount = RepeatCount::new("HOLOBIONT_WORKER_FAULTS", 60);
/// Split clients that are killed or stopped, and as many of their executors: each at every named place.
pub const SPLIT_FAULTS: RepeatCount = RepeatCount::new("HOLOBIONT_SPLIT_FAULTS", 8);
/// Deaths in the course of one fine-tuning job: of each of its processes once.
pub const TUNE_KILLS: RepeatCount = RepeatCount::new("HOLOBIONT_TUNE_KILLS", 4);
/// Seconds in which a process dies every 200 ms.
pub const STORM_S: RepeatCount = RepeatCount::new("HOLOBIONT_STORM_S", 10);
/// Seconds in which many clients come and go. From five minutes on, memory must be flat too.
pub const SOAK_S: RepeatCount = RepeatCount::new("HOLOBIONT_SOAK_S", 15);
/// Layers of the model that deployments serve, where a test does not say otherwise.
pub const LAYERS: RepeatCount = RepeatCount::new("HOLOBIONT_LAYERS", 6);
/// Pairs of prompts to each model that are answered with drafts and without.
pub const SPECULATION: RepeatCount = RepeatCount::new("HOLOBIONT_SPECULATION", 1);
/// Deaths of an executor that verifies drafts, each in the middle of an answer.
pub const DRAFTED_DEATHS: RepeatCount = RepeatCount::new("HOLOBIONT_DRAFTED_DEATHS", 2);
/// Prompts to each model of which every route's answers are compared.
pub const PROMPTS: RepeatCount = RepeatCount::new("HOLOBIONT_PROMPTS", 2);
/// Tokens of each of those answers.
pub const ANSWER: RepeatCount = RepeatCount::new("HOLOBIONT_ANSWER", 8);
/// Tokens of a split client's long context.
pub const CONTEXT: RepeatCount = RepeatCount::new("HOLOBIONT_CONTEXT", 1200);
