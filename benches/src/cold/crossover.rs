//! C-28 and C-06: when waiting for an adapter is faster than starting without it, by rank and prompt length;
//! and how much of an adapter's arithmetic a worker hides behind the base's.
//!
//! One request runs at a time, and its adapter is never on the device. The forecast beside each measurement
//! comes from the executor's own performance model, which it fits at start and writes to its log.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::runtime::Builder;

use super::{ColdCompute, ColdExecutor, ExecutorPlacement, Mode, adapters, arrivals::RequestArrival};
use crate::{
    config::{LinkSpeed, SuiteConfig},
    lora::AdapterShape,
    machine::Cores,
    measure::Samples,
    plot::{self, PlotCurve},
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const RANKS: [usize; 5] = [8, 16, 32, 64, 128];
const LENGTHS: [usize; 6] = [16, 32, 64, 128, 256, 512];
/// Adapters per rank. One returns after all others; the device holds few of them.
const EACH: usize = 8;
const DEVICE_BYTES: u64 = 40 << 20;
/// On this link a load of rank 64 takes about as long, beside a short prefill, as in the paper.
const LINK_GBPS: f64 = 4.0;
/// No adapter arrives over this link before a prompt ends.
const STILL_GBPS: f64 = 0.02;
/// Prompt tokens of the overlap benchmark, and the target of C-06.
const OVERLAP_TOKENS: usize = 256;
const LEAST_OVERLAP: f64 = 0.6;
/// Rounds per share, whose medians give it, and number of shares.
const OVERLAP_ROUNDS: usize = 7;
const OVERLAP_GROUPS: usize = 3;

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let runtime = Builder::new_current_thread().enable_all().build().context("no runtime")?;
    runtime.block_on(measure(config, cores))
}

async fn measure(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir().context("no folder for adapters")?;
    let mut folders = Vec::new();
    for rank in RANKS {
        folders.extend(adapters::write(&config.model, rank, EACH, &folder.path().join(rank.to_string()))?);
    }
    let link_gbps = match config.link {
        LinkSpeed::Gbps(gbps) => gbps,
        LinkSpeed::Prefill | LinkSpeed::Busy => LINK_GBPS,
    };
    let place =
        ExecutorPlacement { device_bytes: DEVICE_BYTES, link_gbps, ..ExecutorPlacement::on(config, cores)? };
    let mut comparisons = lengths(config, place, &folders).await?;
    comparisons.push(overlap(ExecutorPlacement { link_gbps: STILL_GBPS, ..place }, &folders).await?);
    Ok(comparisons)
}

/// Measures time to first token by rank and length, for immediate start and for waiting.
async fn lengths(
    config: &SuiteConfig,
    place: ExecutorPlacement<'_>,
    folders: &[std::path::PathBuf],
) -> Result<Vec<Comparison>> {
    let mut waits = ColdExecutor::start(place, Mode::OnDemand).await?;
    let mut starts = ColdExecutor::start(place, Mode::CpuAssist).await?;
    for executor in [&mut waits, &mut starts] {
        executor.load(folders).await?;
        executor.wait_for_copies().await?;
    }
    let model = LoggedPerfModel::of(&starts, &config.model)?;
    let mut measured = vec![[Vec::new(), Vec::new()]; RANKS.len() * LENGTHS.len()];
    for round in 0..config.runs {
        for (column, &tokens) in LENGTHS.iter().enumerate() {
            for row in 0..RANKS.len() {
                let adapter = row * EACH + (round * LENGTHS.len() + column) % EACH;
                let sides = &mut measured[row * LENGTHS.len() + column];
                for (side, executor) in [&mut waits, &mut starts].into_iter().enumerate() {
                    sides[side].push(first_token_ms(executor, Some(adapter), tokens, round).await?);
                    executor.wait_for_copies().await?;
                }
            }
        }
    }
    let measured: Vec<[Samples; 2]> = measured
        .into_iter()
        .map(|[waits, starts]| Ok([Samples::new(waits)?, Samples::new(starts)?]))
        .collect::<Result<_>>()?;
    if let Some(folder) = &config.plot {
        draw(&measured, &model, place.link_gbps, &folder.join("crossover.svg"))?;
    }
    tell_crossovers(&measured, &model, place.link_gbps);
    Ok(rows(measured, place.link_gbps))
}

fn rows(measured: Vec<[Samples; 2]>, gbps: f64) -> Vec<Comparison> {
    let places = RANKS.iter().flat_map(|rank| LENGTHS.iter().map(move |tokens| (rank, tokens)));
    let row = |((rank, tokens), [waits, starts]): ((&usize, &usize), [Samples; 2])| Comparison {
        bench: "crossover",
        case: format!(
            "first token of {tokens}, rank {rank}, cold, emulated link {gbps:.2} Gbit/s, cpu-assist"
        ),
        unit: "ms",
        better: Better::Lower,
        ours: starts,
        rival: PeerSamples {
            name: "holobiont, on-demand".to_owned(),
            format: "Q4_1".to_owned(),
            samples: waits,
        },
        target: None,
    };
    places.zip(measured).map(row).collect()
}

/// Prints from which length on waiting was faster, and the forecast of that length.
fn tell_crossovers(measured: &[[Samples; 2]], model: &LoggedPerfModel, gbps: f64) {
    for (row, rank) in RANKS.into_iter().enumerate() {
        let cells = &measured[row * LENGTHS.len()..][..LENGTHS.len()];
        let faster = |[waits, starts]: &[Samples; 2]| waits.median() < starts.median();
        // The last slower cell decides, since a single faster cell may be noise.
        let slower = cells.iter().rposition(|cell| !faster(cell)).map_or(0, |last| last + 1);
        let seen = LENGTHS.get(slower);
        let forecast = |hands| (1..=8192).find(|&tokens| model.saved_ms(rank, tokens, gbps, hands) < 0.0);
        eprintln!(
            "holobiont-bench: crossover at rank {rank}, emulated link {gbps:.2} Gbit/s, of 8192 tokens at most: seen \
             {seen:?}, forecast {:?} with a worker, {:?} without",
            forecast(ColdCompute::Worker),
            forecast(ColdCompute::Nobody)
        );
    }
}

fn draw(measured: &[[Samples; 2]], model: &LoggedPerfModel, gbps: f64, path: &Path) -> Result<()> {
    let mut curves = Vec::new();
    for (row, rank) in RANKS.into_iter().enumerate() {
        let cells = &measured[row * LENGTHS.len()..][..LENGTHS.len()];
        let points = LENGTHS.iter().zip(cells);
        let seen = points.map(|(&tokens, [waits, starts])| (tokens as f64, waits.median() - starts.median()));
        let forecast = (LENGTHS[0]..=LENGTHS[LENGTHS.len() - 1])
            .step_by(8)
            .map(|tokens| (tokens as f64, model.saved_ms(rank, tokens, gbps, ColdCompute::Worker)));
        curves.push(PlotCurve {
            name: format!("rank {rank}"),
            points: seen.collect(),
            line: forecast.collect(),
        });
    }
    let title = format!("What starting at once saves a lone cold prompt, emulated link {gbps:.2} Gbit/s");
    plot::lines(path, &title, ["tokens of the prompt", "ms saved to the first token"], &curves)
}

/// Measures how much of the adapter's time is hidden behind the base's: with a worker, without one, and
/// without an adapter.
async fn overlap(place: ExecutorPlacement<'_>, folders: &[std::path::PathBuf]) -> Result<Comparison> {
    let rank = RANKS.len() - 1;
    let folders = &folders[rank * EACH..];
    let mut helped = ColdExecutor::start(place, Mode::CpuAssist).await?;
    let mut alone =
        ColdExecutor::start(ExecutorPlacement { helper: ColdCompute::Nobody, ..place }, Mode::CpuAssist)
            .await?;
    helped.load(folders).await?;
    alone.load(folders).await?;
    let mut shares = Vec::new();
    for group in 0..OVERLAP_GROUPS {
        let mut times: [Vec<f64>; 3] = Default::default();
        for round in 0..OVERLAP_ROUNDS {
            let round = group * OVERLAP_ROUNDS + round;
            // Both adapters queue behind the first on a link that hardly moves.
            let adapter = Some(EACH - 1 - round % 2);
            times[0].push(first_token_ms(&mut alone, None, OVERLAP_TOKENS, round).await?);
            times[1].push(first_token_ms(&mut alone, adapter, OVERLAP_TOKENS, round).await?);
            times[2].push(first_token_ms(&mut helped, adapter, OVERLAP_TOKENS, round).await?);
        }
        let [base, serial, both] = times.map(Samples::new);
        let (base, serial, both) = (base?.median(), serial?.median(), both?.median());
        eprintln!(
            "holobiont-bench: {OVERLAP_TOKENS} cold tokens: base alone {base:.1} ms, adapter after it {serial:.1} ms, beside \
             it {both:.1} ms"
        );
        shares.push((serial - both) / (serial - base).min(base));
    }
    Ok(Comparison {
        bench: "crossover",
        case: format!(
            "overlap of worker and base, a cold prompt of {OVERLAP_TOKENS}, rank {}, one worker, emulated link",
            RANKS[rank]
        ),
        unit: "share of the shorter",
        better: Better::Higher,
        ours: Samples::new(shares)?,
        rival: PeerSamples {
            name: "all of it".to_owned(),
            format: "Q4_1".to_owned(),
            samples: Samples::new(vec![1.0])?,
        },
        target: Some(BenchTarget::OursAtLeast(LEAST_OVERLAP)),
    })
}

async fn first_token_ms(
    executor: &mut ColdExecutor,
    adapter: Option<usize>,
    prompt: usize,
    round: usize,
) -> Result<f64> {
    let seed = ((round * 64 + adapter.unwrap_or(63)) * 1024 + prompt) as u64;
    let arrival = RequestArrival { at: Duration::ZERO, adapter, prompt, answer: 2, seed };
    let served = executor.serve(&[arrival]).await?;
    let first = served.first().context("one request has one answer")?.first;
    Ok(first.as_secs_f64() * 1000.0)
}

/// The executor's performance model (its `perf`), read from the lines in its log.
struct LoggedPerfModel {
    core_ns: [f64; 2],
    base_ns: [f64; 2],
    layers: f64,
    /// Multiply-adds per token and layer, and bytes of an adapter, both per rank.
    work: f64,
    bytes: f64,
}

/// Matrices of a layer: q, k, v.
const MATRICES: f64 = 3.0;

impl LoggedPerfModel {
    fn of(executor: &ColdExecutor, model: &Path) -> Result<Self> {
        let log = executor.log()?;
        let mut told = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let number = |line: &Value, field: &str| line["fields"][field].as_f64().or(line[field].as_f64());
        let line = told
            .rfind(|line| number(line, "base_us_per_token").is_some())
            .context("the executor's log does not tell its costs")?;
        let field = |name: &str| number(&line, name).with_context(|| format!("its log has no {name}"));
        let (layers, work) = AdapterShape::of(model)?.layers_and_sides(&adapters::ADAPTED);
        Ok(Self {
            core_ns: [1000.0 / field("core_multiply_adds_per_us")?, field("core_ns_per_slice")?],
            base_ns: [field("base_us_per_token")? * 1000.0, field("base_us_per_pass")? * 1000.0],
            layers: layers as f64,
            work: work as f64,
            bytes: (2 * layers * work) as f64,
        })
    }

    /// Milliseconds by which an immediate start is faster than waiting: `PerfModel::forecast`.
    fn saved_ms(&self, rank: usize, tokens: usize, gbps: f64, helper: ColdCompute) -> f64 {
        let (tokens, rank) = (tokens as f64, rank as f64);
        let load = rank * self.bytes / (gbps * 125e6) * 1e9;
        let base = (self.base_ns[0] * tokens + self.base_ns[1]) / self.layers;
        let hands = self.core_ns[0] * tokens * rank * self.work + self.core_ns[1] * MATRICES;
        let both = match helper {
            ColdCompute::Worker => hands.max(base),
            ColdCompute::Nobody => hands + base,
        };
        let assisted = (load / both + 0.5).min(self.layers);
        (load - assisted * (both - base)) / 1e6
    }
}
