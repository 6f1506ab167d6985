//! Simulates one run.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::PathBuf,
    time::Duration,
};

use clap::Args;
use serde_json::json;

use super::{CommandError, SimulationOptions, drawing, print};
use crate::engine::CacheSample;

/// Simulates one run of the options.
#[derive(Debug, Args)]
pub(super) struct RunCommand {
    #[command(flatten)]
    options: SimulationOptions,
    /// Writes the cache's state every 100 ms, one JSON object a line.
    #[arg(long, value_name = "PATH")]
    series: Option<PathBuf>,
    /// Draws the device's content over time.
    #[arg(long, value_name = "PATH")]
    chart: Option<PathBuf>,
}

impl RunCommand {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        let header = self.options.header()?;
        print(out, &json!({ "settings": header }))?;
        let observation = self.options.observe(self.series.is_some() || self.chart.is_some())?;
        if let Some(path) = &self.series {
            let mut file = BufWriter::new(File::create(path)?);
            observation.series.iter().try_for_each(|sample| print(&mut file, &line(sample)))?;
            file.flush()?;
        }
        if let Some(path) = &self.chart {
            let end = Duration::from_secs_f64(self.options.duration);
            fs::write(path, drawing::device(&self.options.title(), &observation.series, end, &[]))?;
        }
        let report = self.options.report_of(&observation, self.options.setup()?.cost.block_tokens);
        print(out, &json!({ "variant": self.options.variant.name(), "report": report }))
    }
}

fn line(sample: &CacheSample) -> serde_json::Value {
    let counts = sample.counts;
    json!({
        "at_s": sample.at.as_secs_f64(),
        "used": counts.used,
        "cached": counts.cached,
        "adapters": counts.adapters,
        "free": counts.free,
        "running": sample.sequences.0,
        "waiting": sample.sequences.1,
        "adapters_now": sample.adapters,
        "adapters_low": sample.required,
    })
}
