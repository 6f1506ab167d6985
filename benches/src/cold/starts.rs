//! C-20: requests on adapters that are not on the device, in the three modes, with the same arrivals.
//!
//! First the capacity is measured with every adapter on the device; light and saturated load are shares of
//! it, as the paper's 6 and 9 requests per second are of its GPU's capacity. Then the modes alternate in
//! rounds.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use tokio::runtime::Builder;

use super::{
    ColdExecutor, ExecutorPlacement, Mode, adapters,
    arrivals::{ColdLoad, Popularity},
    executor::ServedTiming,
    tables::{Aggregate, Metric, ModePair, Rounds},
};
use crate::{
    config::{LinkSpeed, SuiteConfig},
    machine::{Cores, pin},
    plot,
    report::{BenchTarget, Comparison},
};

const RANK: usize = 64;
const ADAPTERS: usize = 128;
/// Adapters that fit on the device: 1.5 times the number of simultaneous requests.
const ON_DEVICE: usize = 48;
const BURST: usize = 96;
/// Transfer time of an adapter over time to first token of a lone request (docs/performance).
const LOAD_OVER_PREFILL: f64 = 1.4;
/// Share of the time that loads occupy a busy link under saturated load.
const BUSY: f64 = 0.85;
const SATURATED: f64 = 0.9;
const LONE: usize = 12;
/// Bytes per second of a gigabit per second.
const GIGABIT: f64 = 125e6;

struct LoadCell {
    name: &'static str,
    share: f64,
    requests: usize,
    popularity: Popularity,
    /// Minimum ratio of on-demand's to cached's time to first token; below it there is no transfer to hide.
    on_demand: f64,
}

/// The adapters that are on the device first are excluded, so each of these starts cold.
const DISTINCT: Popularity = Popularity::Distinct { first: ON_DEVICE };

const CELLS: [LoadCell; 3] = [
    LoadCell { name: "light", share: 0.4, requests: 60, popularity: DISTINCT, on_demand: 1.4 },
    LoadCell { name: "saturated", share: SATURATED, requests: 150, popularity: DISTINCT, on_demand: 4.0 },
    LoadCell {
        name: "skewed",
        share: 0.75,
        requests: 120,
        popularity: Popularity::Zipf { s: 0.26 },
        on_demand: 1.3,
    },
];

/// Maximum ratio of cpu-assist's time to first token to cached's, and minimum ratio of on-demand's request
/// latency to cpu-assist's.
const MAX_FIRST_TOKEN_SHARE: f64 = 1.22;
const LEAST_LATENCY: f64 = 1.25;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let runtime = Builder::new_current_thread().enable_all().build().context("no runtime")?;
    runtime.block_on(measure(config, cores))
}

#[derive(Debug, Clone, Copy)]
struct MachineSpeed {
    /// Capacity in requests per second.
    capacity: f64,
    /// Time to first token of a lone request, in milliseconds.
    first_token_ms: f64,
}

async fn measure(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir().context("no folder for adapters")?;
    let folders = adapters::write(&config.model, RANK, ADAPTERS, folder.path())?;
    let mut place = ExecutorPlacement::on(config, cores)?;
    let mut cached = ColdExecutor::start(place, Mode::Cached).await?;
    cached.load(&folders).await?;
    let bytes = cached.stats().await?.device_bytes / ADAPTERS as u64;
    let speed = speed(&mut cached).await?;
    place.device_bytes = bytes * ON_DEVICE as u64;
    place.link_gbps = speed.link_gbps(config.link, bytes);
    let setting = ExperimentSetting { speed, bytes, gbps: place.link_gbps };
    setting.print_setting();
    let mut executors = vec![cached];
    for mode in [Mode::OnDemand, Mode::CpuAssist] {
        executors.push(started(place, mode, &folders).await?);
    }
    // The client costs little; it shares the worker's core, so that the base has its core alone.
    pin(place.worker_core)?;
    let mut comparisons = Vec::new();
    for (number, cell) in CELLS.iter().enumerate() {
        let rounds = cell.measure(config, speed, &mut executors, number).await?;
        comparisons.extend(cell.compare(&setting, &rounds)?);
        if let Some(folder) = &config.plot {
            let name = format!("cold-start-{}-{}.svg", cell.name, config.link.name());
            cell.plot(&setting, &rounds, &folder.join(name))?;
        }
    }
    Ok(comparisons)
}

/// Starts an executor whose device tier is full of adapters that no request uses.
async fn started(place: ExecutorPlacement<'_>, mode: Mode, folders: &[PathBuf]) -> Result<ColdExecutor> {
    let mut executor = ColdExecutor::start(place, mode).await?;
    executor.load(folders).await?;
    executor.wait_for_copies().await?;
    Ok(executor)
}

async fn speed(cached: &mut ColdExecutor) -> Result<MachineSpeed> {
    let load = |rate, requests| ColdLoad { rate, requests, adapters: ADAPTERS, popularity: DISTINCT };
    cached.serve(&load(1e6, BURST / 3).arrivals(1)).await?;
    let mut first = Vec::new();
    for arrival in load(1e6, LONE).arrivals(2) {
        first
            .extend(cached.serve(&[arrival]).await?.iter().map(|served| served.first.as_secs_f64() * 1000.0));
    }
    let first_token_ms = crate::measure::Samples::new(first)?.mean();
    let served = cached.serve(&load(1e6, BURST).arrivals(3)).await?;
    let last = served.iter().map(|served| served.last).max().unwrap_or_default();
    Ok(MachineSpeed { capacity: BURST as f64 / last.as_secs_f64(), first_token_ms })
}

impl MachineSpeed {
    /// Speed of the link for adapters of `bytes`.
    fn link_gbps(self, link: LinkSpeed, bytes: u64) -> f64 {
        let load_s = match link {
            LinkSpeed::Gbps(gbps) => return gbps,
            LinkSpeed::Prefill => self.first_token_ms / 1000.0 * LOAD_OVER_PREFILL,
            LinkSpeed::Busy => BUSY / (SATURATED * self.capacity),
        };
        bytes as f64 / load_s / GIGABIT
    }
}

struct ExperimentSetting {
    speed: MachineSpeed,
    bytes: u64,
    gbps: f64,
}

impl ExperimentSetting {
    /// Transfer time of an adapter in milliseconds.
    fn load_ms(&self) -> f64 {
        self.bytes as f64 / self.gbps / GIGABIT * 1000.0
    }

    fn print_setting(&self) {
        let MachineSpeed { capacity, first_token_ms } = self.speed;
        let (gbps, mib, load_ms) = (self.gbps, self.bytes as f64 / f64::from(1 << 20), self.load_ms());
        eprintln!(
            "holobiont-bench: cold starts: capacity {capacity:.2} requests/s, lone first token {first_token_ms:.1} ms, \
             emulated link {gbps:.2} Gbit/s: an adapter of {mib:.1} MiB travels for {load_ms:.1} ms"
        );
    }
}

impl LoadCell {
    fn rate(&self, speed: MachineSpeed) -> f64 {
        self.share * speed.capacity
    }

    /// Measures all modes with the same arrivals, in another order every round.
    async fn measure(
        &self,
        config: &SuiteConfig,
        speed: MachineSpeed,
        executors: &mut [ColdExecutor],
        number: usize,
    ) -> Result<[Rounds; 3]> {
        let load = ColdLoad {
            rate: self.rate(speed),
            requests: self.requests,
            adapters: ADAPTERS,
            popularity: self.popularity,
        };
        let mut rounds: [Rounds; 3] = Default::default();
        for round in 0..config.runs {
            let arrivals = load.arrivals(100 + (number * 1000 + round) as u64);
            for turn in 0..executors.len() {
                let who = (turn + round) % executors.len();
                let executor = &mut executors[who];
                let before = executor.stats().await?;
                let served = executor.serve(&arrivals).await?;
                let after = executor.stats().await?;
                self.print_counts(executor.mode, &served, &[before, after]);
                rounds[who].0.push(served);
                executor.wait_for_copies().await?;
            }
        }
        Ok(rounds)
    }

    fn print_counts(
        &self,
        mode: Mode,
        served: &[ServedTiming],
        [before, after]: &[shmproto::message::Stats; 2],
    ) {
        let requests = served.len() as f64;
        let sum = |of: fn(&shmproto::message::AdapterStats) -> u64, stats: &shmproto::message::Stats| {
            stats.adapters.iter().map(of).sum::<u64>() as f64
        };
        let rows = |of: fn(&shmproto::message::AdapterStats) -> u64| sum(of, after) - sum(of, before);
        let (device, workers, here) =
            (rows(|a| a.rank_rows_device), rows(|a| a.rank_rows_workers), rows(|a| a.rank_rows_executor));
        let all = (device + workers + here).max(1.0);
        let ms = |after: u64, before: u64| (after - before) as f64 / 1000.0 / requests;
        let first = served.iter().map(|served| served.first.as_secs_f64()).sum::<f64>() / requests * 1000.0;
        eprintln!(
            "holobiont-bench: {}, {}: first token {first:.1} ms, cold {:.2}, wait for loads {:.1} ms, for workers {:.2} ms a \
             request; adapters' work: device {:.3}, workers {:.3}, executor {:.3}",
            self.name,
            mode.name(),
            (after.cold_starts - before.cold_starts) as f64 / requests,
            ms(after.load_wait_us, before.load_wait_us),
            ms(after.worker_wait_us, before.worker_wait_us),
            device / all,
            workers / all,
            here / all,
        );
    }

    fn case(&self, setting: &ExperimentSetting) -> String {
        let (name, rate) = (self.name, self.rate(setting.speed));
        let which = match self.popularity {
            Popularity::Distinct { .. } => "distinct adapters".to_owned(),
            Popularity::Zipf { s } => format!("Zipf {s} of {ADAPTERS}, {ON_DEVICE} fit"),
        };
        format!(
            "{name}, {rate:.2} requests/s, rank {RANK}, {which}, emulated link {:.2} Gbit/s, load {:.0} ms",
            setting.gbps,
            setting.load_ms()
        )
    }

    fn compare(&self, setting: &ExperimentSetting, rounds: &[Rounds; 3]) -> Result<Vec<Comparison>> {
        let case = self.case(setting);
        let [cached, on_demand, assist] = rounds;
        let (cached, on_demand, assist) =
            ((Mode::Cached, cached), (Mode::OnDemand, on_demand), (Mode::CpuAssist, assist));
        let pair = |ours, peer| ModePair { bench: "cold-start", case: &case, ours, peer };
        let mut rows = Vec::new();
        for metric in Metric::EACH {
            for over in Aggregate::EACH {
                let is_goal = over == Aggregate::Mean;
                if metric == Metric::LoadWait {
                    rows.push(pair(on_demand, assist).compare(metric, over, None)?);
                    continue;
                }
                let when = |metric_of: Metric, target| (is_goal && metric == metric_of).then_some(target);
                let first = Metric::FirstToken;
                let most = when(first, BenchTarget::ShareAtMost(MAX_FIRST_TOKEN_SHARE));
                rows.push(pair(assist, cached).compare(metric, over, most)?);
                let least = when(first, BenchTarget::ShareAtLeast(self.on_demand));
                rows.push(pair(on_demand, cached).compare(metric, over, least)?);
                let least = when(Metric::Latency, BenchTarget::RatioAtLeast(LEAST_LATENCY));
                rows.push(pair(assist, on_demand).compare(metric, over, least)?);
            }
        }
        ensure!(!rows.is_empty(), "nothing was compared");
        Ok(rows)
    }

    fn plot(&self, setting: &ExperimentSetting, rounds: &[Rounds; 3], path: &Path) -> Result<()> {
        let curves = Mode::EACH
            .iter()
            .zip(rounds)
            .map(|(mode, rounds)| Ok((mode.name(), rounds.all(Metric::FirstToken)?)))
            .collect::<Result<Vec<_>>>()?;
        plot::distribution(path, &format!("Time to first token, {}", self.case(setting)), &curves)
    }
}
