//! Finds the highest rate at which the mean time to first token is below a limit (E-21).

use std::io::Write;

use clap::Args;
use kv_cache::replacement::Variant;
use serde_json::json;

use super::{CommandError, SimulationOptions, print, side_by_side};
use crate::statistics::mean;

/// Finds the highest rate at which the mean time to first token is below a limit.
#[derive(Debug, Args)]
pub(super) struct Peak {
    #[command(flatten)]
    options: SimulationOptions,
    /// Number of seeds, from --seed on, whose mean is taken.
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Variants to measure; all by default.
    #[arg(long, value_delimiter = ',')]
    variants: Vec<Variant>,
    /// Limit on the mean time to first token in milliseconds.
    #[arg(long, default_value_t = 500.0, value_name = "MS")]
    limit: f64,
    /// Highest rate that is tried.
    #[arg(long, default_value_t = 50.0, value_name = "PER_S")]
    max_rate: f64,
}

/// Relative precision of the rate.
const RESOLUTION: f64 = 0.02;

impl Peak {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let variants = if self.variants.is_empty() { Variant::ALL.to_vec() } else { self.variants.clone() };
        print(
            out,
            &json!({ "settings": self.options.header()?, "seeds": self.seeds, "limit_ms": self.limit }),
        )?;
        let mut of_elora = None;
        for variant in variants {
            let peak = self.peak(variant)?;
            if variant == Variant::Elora {
                of_elora = Some(peak);
            }
            let ratio = of_elora.map(|elora| peak / elora);
            print(out, &json!({ "variant": variant.name(), "peak_per_s": peak, "ratio": ratio }))?;
        }
        Ok(())
    }

    fn peak(&self, variant: Variant) -> Result<f64, CommandError> {
        let options = SimulationOptions { variant, ..self.options.clone() };
        let (mut low, mut high) = (0.05, 0.1);
        while high < self.max_rate && self.holds(&options, high)? {
            (low, high) = (high, high * 2.0);
        }
        while high - low > RESOLUTION * high {
            let middle = (low + high) / 2.0;
            match self.holds(&options, middle)? {
                true => low = middle,
                false => high = middle,
            }
        }
        Ok(low)
    }

    fn holds(&self, options: &SimulationOptions, rate: f64) -> Result<bool, CommandError> {
        let jobs = side_by_side::seeds(&SimulationOptions { rate, ..options.clone() }, self.seeds);
        let ttft: Vec<f64> = side_by_side::reports(&jobs)?.iter().map(|report| report.ttft_ms.mean).collect();
        Ok(mean(&ttft) < self.limit)
    }
}
