//! Experiment E-24: the device's content as the load rises and as more adapters are requested.

use std::{fs, io::Write, path::PathBuf, time::Duration};

use clap::Args;
use serde_json::json;

use super::{CommandError, SimulationOptions, drawing, print};
use crate::{
    engine::{CacheSample, Engine, Setup},
    statistics::mean,
    workload::{ShareAccounting, Workload},
};

/// Runs four phases and checks the device's content in each.
#[derive(Debug, Args)]
pub(super) struct Phases {
    #[command(flatten)]
    options: SimulationOptions,
    /// Requests per second of the phases; the last has twice as many adapters.
    #[arg(long, value_delimiter = ',', default_values_t = [0.2, 1.0, 1.8, 1.8])]
    rates: Vec<f64>,
    /// Draws the device's content over time.
    #[arg(long, value_name = "PATH")]
    chart: Option<PathBuf>,
}

const NAMES: [&str; 4] = ["light", "rising", "heavy", "more adapters"];

/// Mean content of the device in the second half of a phase.
#[derive(Debug, Clone, Copy, serde::Serialize)]
struct DeviceOccupancy {
    used_blocks: f64,
    history_blocks: f64,
    adapter_blocks: f64,
    adapters: f64,
    required: f64,
    running: f64,
}

impl Phases {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<(), CommandError> {
        if self.rates.len() != NAMES.len() || self.rates.iter().any(|rate| !rate.is_finite() || *rate <= 0.0)
        {
            return Err(CommandError::Option("--rates"));
        }
        let length = Duration::from_secs_f64(self.options.duration);
        print(
            out,
            &json!({ "settings": self.options.header()?, "rates_per_s": self.rates, "phases": NAMES }),
        )?;
        let workload = self.workload(length)?;
        let setup = Setup { keeps_series: true, end: length * 4, ..self.options.setup()? };
        let series = Engine::new(setup, &workload)?.run()?.series;
        let held: Vec<DeviceOccupancy> = (0..4).map(|phase| held(&series, length, phase)).collect();
        for (name, held) in NAMES.iter().zip(&held) {
            print(out, &json!({ "phase": name, "held": held }))?;
        }
        let at_end_of_first =
            series.iter().rfind(|sample| sample.at < length).map_or(0.0, |sample| sample.adapters);
        let [light, rising, heavy, more] = [0, 1, 2, 3].map(|phase| held[phase]);
        print(
            out,
            &json!({
                "every_adapter_is_there_under_light_load": at_end_of_first >= self.options.adapters as f64,
                "adapters_there": at_end_of_first,
                "history_grows_as_load_rises": rising.history_blocks > light.history_blocks,
                "adapters_leave_as_load_rises": rising.adapter_blocks < light.adapter_blocks,
                "running_takes_from_history_under_heavy_load":
                    heavy.used_blocks > rising.used_blocks && heavy.history_blocks < rising.history_blocks,
                "adapters_take_more_where_more_are_asked_for": more.adapter_blocks > heavy.adapter_blocks,
            }),
        )?;
        if let Some(path) = &self.chart {
            let marks: Vec<(f64, &str)> =
                (0_u32..).zip(NAMES).map(|(phase, name)| ((length * phase).as_secs_f64(), name)).collect();
            fs::write(path, drawing::device(&self.options.title(), &series, length * 4, &marks))?;
        }
        Ok(())
    }

    /// Returns a workload of all phases in sequence.
    fn workload(&self, length: Duration) -> Result<Workload, CommandError> {
        let mut all =
            Workload { adapters: Vec::new(), conversations: Vec::new(), shares: ShareAccounting::ByTenant };
        for (phase, &rate) in self.rates.iter().enumerate() {
            let adapters = if phase == 3 { 2 * self.options.adapters } else { self.options.adapters };
            let seed = self.options.seed + 1000 * phase as u64;
            let part = SimulationOptions { rate, adapters, seed, ..self.options.clone() }.workload()?;
            all.adapters = part.adapters;
            for mut conversation in part.conversations {
                conversation.start += length * phase as u32;
                conversation.content |= (phase as u64) << 48;
                all.conversations.push(conversation);
            }
        }
        Ok(all)
    }
}

fn held(series: &[CacheSample], length: Duration, phase: u32) -> DeviceOccupancy {
    let (from, to) = (length * phase + length / 2, length * (phase + 1));
    let of = |value: fn(&CacheSample) -> f64| -> f64 {
        let inside = series.iter().filter(|sample| (from..to).contains(&sample.at));
        mean(&inside.map(value).collect::<Vec<_>>())
    };
    DeviceOccupancy {
        used_blocks: of(|sample| sample.counts.used as f64),
        history_blocks: of(|sample| sample.counts.cached as f64),
        adapter_blocks: of(|sample| sample.counts.adapters as f64),
        adapters: of(|sample| sample.adapters),
        required: of(|sample| sample.required),
        running: of(|sample| sample.sequences.0 as f64),
    }
}
