//! Shows that a fixed share for adapters wastes memory (E-26): few adapters leave their share unused while
//! history is evicted, and more adapters evict each other.

use std::io::Write;

use clap::Args;
use kv_cache::replacement::Variant;
use serde_json::json;

use super::{CommandError, SimulationOptions, print};
use crate::{
    engine::{CacheSample, Observation},
    report::SimulationReport,
    statistics::mean,
};

/// Measures the used part of each side of a divided device, with few adapters and with more.
#[derive(Debug, Args)]
pub(super) struct Starvation {
    #[command(flatten)]
    options: SimulationOptions,
    /// Numbers of adapters to simulate.
    #[arg(long, value_delimiter = ',', default_values_t = [29, 48, 96])]
    counts: Vec<usize>,
}

/// A side has spare capacity if at most this part of it is in use.
const ROOMY: f64 = 0.75;

/// Mean used fractions of the two sides after the warm-up.
#[derive(Debug, Clone, Copy, serde::Serialize)]
struct SideUse {
    /// Fraction of the KV side that running sequences use.
    running: f64,
    /// Fraction of the KV side that running sequences and history use.
    keys_and_values: f64,
    /// Fraction of the adapter side in use.
    adapters: f64,
}

impl Starvation {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let Some(share) = self.options.adapter_share.filter(|share| *share < 1.0) else {
            return Err(CommandError::Option("--adapter-share"));
        };
        print(out, &json!({ "settings": self.options.header()?, "counts": self.counts }))?;
        for &adapters in &self.counts {
            let divided = SimulationOptions { adapters, variant: Variant::Static, ..self.options.clone() };
            let (observation, blocks) = (divided.observe(true)?, f64::from(divided.setup()?.device_blocks));
            let used = self.used(&observation, [blocks * (1.0 - share), blocks * share]);
            let statistics = observation.statistics;
            print(
                out,
                &json!({
                    "adapters": adapters, "variant": divided.variant.name(), "used": used,
                    "report": self.report(&divided, &observation)?,
                    "history_leaves_beside_room_for_adapters":
                        statistics.evicted_blocks > 0 && used.adapters <= ROOMY,
                    "adapters_leave_beside_room_for_history":
                        statistics.evicted_adapters > 0 && used.keys_and_values <= ROOMY,
                    "adapters_leave_beside_history_that_nobody_computes_with":
                        statistics.evicted_adapters > 0 && used.running <= ROOMY,
                }),
            )?;
            let one = SimulationOptions { variant: Variant::Elora, adapter_share: None, ..divided };
            let report = self.report(&one, &one.observe(false)?)?;
            print(out, &json!({ "adapters": adapters, "variant": one.variant.name(), "report": report }))?;
        }
        Ok(())
    }

    fn report(
        &self,
        options: &SimulationOptions,
        observation: &Observation,
    ) -> Result<SimulationReport, CommandError> {
        Ok(options.report_of(observation, options.setup()?.cost.block_tokens))
    }

    /// `sides` are block counts: of the KV cache, and of adapters.
    fn used(&self, observation: &Observation, sides: [f64; 2]) -> SideUse {
        let measured = self.options.warmup..self.options.duration;
        let of = |value: fn(&CacheSample) -> usize| -> f64 {
            let inside =
                observation.series.iter().filter(|sample| measured.contains(&sample.at.as_secs_f64()));
            mean(&inside.map(|sample| value(sample) as f64).collect::<Vec<_>>())
        };
        SideUse {
            running: of(|sample| sample.counts.used) / sides[0],
            keys_and_values: of(|sample| sample.counts.used + sample.counts.cached) / sides[0],
            adapters: of(|sample| sample.counts.adapters) / sides[1],
        }
    }
}
