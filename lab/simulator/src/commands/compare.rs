//! Compares all variants on the same workloads, seed by seed.

use std::{fs, io::Write, path::PathBuf};

use clap::Args;
use kv_cache::replacement::Variant;
use serde::Serialize;
use serde_json::json;

use super::{CommandError, SimulationOptions, print, side_by_side};
use crate::{
    chart::{self, Bar},
    report::SimulationReport,
    statistics::{half_interval, mean},
};

/// Compares all variants on the same workloads.
#[derive(Debug, Args)]
pub(super) struct Compare {
    #[command(flatten)]
    options: SimulationOptions,
    /// Number of seeds, from --seed on.
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// Variants to compare; all by default. The reference variant is always included.
    #[arg(long, value_delimiter = ',')]
    variants: Vec<Variant>,
    /// Also prints a line for each run.
    #[arg(long)]
    each: bool,
    /// Draws the mean time to first token of each variant.
    #[arg(long, value_name = "PATH")]
    chart: Option<PathBuf>,
}

/// Mean of a metric over all seeds, and half the width of its 95 % interval.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct IntervalEstimate {
    pub(super) mean: f64,
    pub(super) half_interval: f64,
}

impl IntervalEstimate {
    pub(super) fn of(values: &[f64]) -> Self {
        Self { mean: mean(values), half_interval: half_interval(values) }
    }
}

/// Ratio of a metric to the reference, seed by seed (the geometric mean, and the ends of its 95 % interval).
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Ratio {
    pub(super) mean: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Ratio {
    pub(super) fn of(values: &[f64], to: &[f64]) -> Self {
        let logs: Vec<f64> = values.iter().zip(to).map(|(value, to)| (value / to).ln()).collect();
        let (mean, half) = (mean(&logs), half_interval(&logs));
        Self { mean: mean.exp(), low: (mean - half).exp(), high: (mean + half).exp() }
    }
}

type ReportMetric = (&'static str, fn(&SimulationReport) -> f64);

const FIGURES: [ReportMetric; 15] = [
    ("ttft_ms", |report| report.ttft_ms.mean),
    ("ttft_p95_ms", |report| report.ttft_ms.p95),
    ("ttft_p99_ms", |report| report.ttft_ms.p99),
    ("ttft_queue_ms", |report| report.split_ms.queue),
    ("ttft_adapter_ms", |report| report.split_ms.adapter),
    ("ttft_kv_ms", |report| report.split_ms.kv),
    ("tpot_ms", |report| report.tpot_ms.mean),
    ("tpot_p99_ms", |report| report.tpot_ms.p99),
    ("device_hits", |report| report.device_hits),
    ("lower_hits", |report| report.lower_hits),
    ("adapter_hits", |report| report.adapter_hits),
    ("prefill_tokens", |report| report.prefill_tokens as f64),
    ("invalid_share", |report| report.invalid_share),
    ("adapter_share", |report| report.adapter_share),
    ("link_share", |report| report.link_share),
];

const COMPARED: [&str; 4] = ["ttft_ms", "ttft_p99_ms", "tpot_ms", "prefill_tokens"];

impl Compare {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let variants = if self.variants.is_empty() { Variant::ALL.to_vec() } else { self.variants.clone() };
        print(out, &json!({ "settings": self.options.header()?, "seeds": self.seeds }))?;
        let of = |variant: &Variant| {
            side_by_side::seeds(&SimulationOptions { variant: *variant, ..self.options.clone() }, self.seeds)
        };
        let jobs: Vec<SimulationOptions> = variants.iter().flat_map(of).collect();
        let reports = side_by_side::reports(&jobs)?;
        if self.each {
            for (job, report) in jobs.iter().zip(&reports) {
                print(out, &json!({ "variant": job.variant.name(), "seed": job.seed, "report": report }))?;
            }
        }
        let by_variant: Vec<&[SimulationReport]> = reports.chunks(self.seeds as usize).collect();
        let base = variants.iter().position(|variant| *variant == Variant::Elora).unwrap_or(0);
        let mut bars = Vec::new();
        for (variant, reports) in variants.iter().zip(&by_variant) {
            let values = |of: &[SimulationReport], figure: fn(&SimulationReport) -> f64| -> Vec<f64> {
                of.iter().map(figure).collect()
            };
            let mut line = serde_json::Map::new();
            line.insert("variant".to_owned(), json!(variant.name()));
            for (name, figure) in FIGURES {
                line.insert(name.to_owned(), json!(IntervalEstimate::of(&values(reports, figure))));
            }
            let compared = FIGURES.iter().filter(|(name, _)| COMPARED.contains(name));
            let ratios = compared.map(|(name, figure)| {
                let ratio = Ratio::of(&values(reports, *figure), &values(by_variant[base], *figure));
                ((*name).to_owned(), json!(ratio))
            });
            line.insert("ratios".to_owned(), ratios.collect::<serde_json::Map<_, _>>().into());
            print(out, &line)?;
            let ttft = IntervalEstimate::of(&values(reports, FIGURES[0].1));
            bars.push(Bar {
                name: variant.name().to_owned(),
                value: ttft.mean,
                half_interval: ttft.half_interval,
            });
        }
        if let Some(path) = &self.chart {
            let title =
                format!("{} at {} requests/s, {} seeds", self.options.title(), self.options.rate, self.seeds);
            fs::write(path, chart::bars(&title, "mean time to first token, ms", &bars))?;
        }
        Ok(())
    }
}
