//! Reports survived faults as a line of JSON per run, with counters that add up over runs and machines.
//!
//! `HOLOBIONT_LEDGER` names a file to which lines are appended.

use std::{collections::BTreeMap, env, fs::File, io::Write as _};

use serde_json::{Value, json};

/// Counters of one run.
#[derive(Debug, Default)]
pub struct ChaosReport {
    test: &'static str,
    seed: u64,
    hits: BTreeMap<String, u64>,
    counts: BTreeMap<&'static str, u64>,
}

impl ChaosReport {
    /// Creates the ledger of `test`, run with `seed`.
    #[must_use]
    pub fn new(test: &'static str, seed: u64) -> Self {
        Self { test, seed, ..Self::default() }
    }

    /// Records a kill at `place`.
    pub fn hit(&mut self, place: &str) {
        *self.hits.entry(place.to_owned()).or_default() += 1;
    }

    /// Adds to a counter.
    pub fn count(&mut self, figure: &'static str, by: u64) {
        *self.counts.entry(figure).or_default() += by;
    }

    /// Returns the number of hits of `place`.
    #[must_use]
    pub fn hits(&self, place: &str) -> u64 {
        self.hits.get(place).copied().unwrap_or(0)
    }

    /// Returns the total number of kills.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.hits.values().sum()
    }

    /// Prints the run and appends it to the file, if one is set.
    pub fn write(&self) {
        let line = self.line();
        eprintln!("{line}");
        if let Some(path) = env::var_os("HOLOBIONT_LEDGER") {
            let mut file = File::options().append(true).create(true).open(path).expect("the ledger's file");
            writeln!(file, "{line}").expect("the ledger can be written");
        }
    }

    fn line(&self) -> Value {
        json!({
            "test": self.test,
            "version": env!("CARGO_PKG_VERSION"),
            "seed": self.seed,
            "kills": self.total(),
            "places": self.hits,
            "counts": self.counts,
        })
    }
}
