//! Measures times to first token over the device share reserved for adapters (E-26).

use std::{fs, io::Write, path::PathBuf};

use clap::Args;
use kv_cache::replacement::Variant;
use serde_json::json;

use super::{CommandError, SimulationOptions, compare::IntervalEstimate, print, side_by_side};
use crate::chart::{self, ChartLine};

/// Varies a fixed share for adapters from a twentieth to a half of the device.
#[derive(Debug, Args)]
pub(super) struct Knee {
    #[command(flatten)]
    options: SimulationOptions,
    /// Number of seeds, from --seed on.
    #[arg(long, default_value_t = 10)]
    seeds: u64,
    /// Numbers of adapters to simulate.
    #[arg(long, value_delimiter = ',', default_values_t = [20, 50])]
    counts: Vec<usize>,
    /// Draws the times as a chart.
    #[arg(long, value_name = "PATH")]
    chart: Option<PathBuf>,
}

/// Points above this multiple of the best share's time are not drawn.
const DRAWN_TIMES: f64 = 5.0;

/// Shares in percent of the device.
const SHARES: [u32; 10] = [5, 10, 15, 20, 25, 30, 35, 40, 45, 50];

impl Knee {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        print(out, &json!({ "settings": self.options.header()?, "seeds": self.seeds }))?;
        let mut lines = Vec::new();
        for &adapters in &self.counts {
            let points = self.curve(adapters, out)?;
            let best = points.iter().min_by(|one, other| one.1.total_cmp(&other.1));
            print(out, &json!({ "adapters": adapters, "knee_share": best.map(|point| point.0) }))?;
            let unified = SimulationOptions { adapters, ..self.options.clone() };
            let ttft = self.estimate(&unified)?;
            print(out, &json!({ "adapters": adapters, "variant": unified.variant.name(), "ttft_ms": ttft }))?;
            // Points where adapters starve would hide all others.
            let is_drawn = |point: &(f64, f64)| best.is_some_and(|best| point.1 < DRAWN_TIMES * best.1);
            let drawn = points.iter().copied().filter(is_drawn).collect();
            lines.push(ChartLine { name: format!("{adapters} adapters, static"), points: drawn });
            let flat = SHARES.map(|share| (f64::from(share) / 100.0, ttft.mean)).to_vec();
            lines.push(ChartLine { name: format!("{adapters}, {}", unified.variant), points: flat });
        }
        if let Some(path) = &self.chart {
            let axes = ("share of the device that adapters have", "mean time to first token, ms");
            fs::write(path, chart::lines(&self.options.title(), axes, &lines, &[]))?;
        }
        Ok(())
    }

    fn curve(&self, adapters: usize, out: &mut impl Write) -> Result<Vec<(f64, f64)>, CommandError> {
        let mut points = Vec::new();
        for share in SHARES.map(|share| f64::from(share) / 100.0) {
            let options = self.options.clone();
            let fixed = SimulationOptions {
                adapters,
                variant: Variant::Static,
                adapter_share: Some(share),
                ..options
            };
            let ttft = self.estimate(&fixed)?;
            print(out, &json!({ "adapters": adapters, "share": share, "ttft_ms": ttft }))?;
            points.push((share, ttft.mean));
        }
        Ok(points)
    }

    fn estimate(&self, options: &SimulationOptions) -> Result<IntervalEstimate, CommandError> {
        let reports = side_by_side::reports(&side_by_side::seeds(options, self.seeds))?;
        Ok(IntervalEstimate::of(&reports.iter().map(|report| report.ttft_ms.mean).collect::<Vec<_>>()))
    }
}
