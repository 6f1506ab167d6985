//! A base streamed from disk beside one in memory: time and bytes read per token, by memory bound.
//!
//! Reads bypass the page cache, so the disk is the machine's own. The emulated disk is so slow that reading
//! dominates a pass, as on the paper's devices; its lines say so.
//!
//! - this file: without drafts. [`drafted`]: with drafts, beside the paper's baselines. [`history`]: beside
//!   copied KV cache.
//! - [`engine`]: our engine in this process. [`big_little`]: the lossy baseline.

mod big_little;
mod drafted;
mod engine;
mod history;

use std::{num::NonZeroU64, path::Path, sync::Arc, time::Instant};

use anyhow::{Context, Result};
use model::{
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass as _, LogitRows, SequenceSlice},
    resident::{LoadedWeights, ResidentModel, ResidentOptions},
    sources::open::open,
    weight_stream_stats::WeightStreamStats,
    weights::{
        served::ServedLayers,
        streamed::{Readahead, StreamOptions},
    },
};
use types::BlockId;

use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const STREAMS: [usize; 3] = [1, 4, 8];
/// Steps of a measurement, and context tokens before it.
const STEPS: usize = 32;
/// Memory bounds in percent of all weights: from resident down to the double buffer's minimum.
const BOUNDS: [u64; 4] = [100, 75, 50, 25];
/// Speed of the emulated disk in bytes per second.
const SLOW: u64 = 100 << 20;

struct StreamedSide {
    model: ResidentModel<ServedLayers>,
    sweep_bytes: u64,
}

struct StreamMeasurement {
    tokens_per_s: f64,
    mib_per_token: f64,
    reading: f64,
    /// Share of the reading time that the pass did not wait for.
    hidden: f64,
}

#[derive(Clone, Copy)]
struct ReadMode {
    percent: u64,
    readahead: Readahead,
    bytes_per_s: Option<NonZeroU64>,
}

impl StreamedSide {
    fn open(path: &Path, directory: &Path, cores: &Cores, way: ReadMode) -> Result<Self> {
        let source = open(path)?;
        let threads = cores.numbers().len();
        let all = LoadedWeights::load(&*source, threads)?.bytes() as u64;
        let stream = StreamOptions {
            path: directory.join("packed.weights"),
            program: [0; 32],
            bound_bytes: all * way.percent / 100,
            readahead: way.readahead,
            bytes_per_s: way.bytes_per_s,
        };
        let streamed = (way.percent < 100).then_some((&[0; 32], &stream));
        let weights = LoadedWeights::open(&*source, streamed, threads, &|_| {})?;
        let sweep_bytes = weights.sweep_bytes();
        let options =
            ResidentOptions { cores: cores.numbers().to_vec(), kv_bytes: 256 << 20, kv_dtype: None };
        Ok(Self { model: ResidentModel::new(weights, &options)?, sweep_bytes })
    }

    fn decode(&mut self, streams: usize) -> Result<StreamMeasurement> {
        let each = (2 * STEPS).div_ceil(BLOCK_TOKENS);
        let blocks: Vec<BlockId> = (0..(streams * each) as u32).map(BlockId).collect();
        let tokens: Vec<u32> = (1000..1000 + 2 * STEPS as u32).collect();
        self.pass(&tokens[..STEPS], 0, &blocks, each)?;
        let before = self.totals();
        let begun = Instant::now();
        for at in STEPS..2 * STEPS {
            self.pass(&tokens[at..=at], at, &blocks, each)?;
        }
        let took = begun.elapsed().as_secs_f64();
        let after = self.totals();
        let [bytes, read, waited] = [0, 1, 2].map(|figure| after[figure] - before[figure]);
        let count = (streams * STEPS) as f64;
        Ok(StreamMeasurement {
            tokens_per_s: count / took,
            mib_per_token: bytes / count / f64::from(1 << 20),
            reading: 100.0 * read / took,
            hidden: if read > 0.0 { 100.0 * (1.0 - waited / read).max(0.0) } else { 100.0 },
        })
    }

    fn pass(&mut self, tokens: &[u32], start: usize, blocks: &[BlockId], each: usize) -> Result<()> {
        let slice = |blocks| {
            let (adapter, logits) = (None, LogitRows::Last);
            SequenceSlice::<'_, PreparedAdapter> { tokens, start, blocks, trunk: &[], adapter, logits }
        };
        let batch: Vec<_> = blocks.chunks(each).map(slice).collect();
        self.model.forward(&batch, &mut Vec::new()).context("a pass failed")
    }

    fn weight_stats(&self) -> Option<Arc<WeightStreamStats>> {
        self.model.sweep_figures()
    }

    /// Bytes read, seconds spent reading, and seconds waited.
    fn totals(&self) -> [f64; 3] {
        self.model.sweep_figures().map_or([0.0; 3], |totals| {
            [totals.read_bytes() as f64, totals.read_time().as_secs_f64(), totals.waited().as_secs_f64()]
        })
    }
}

/// Measures every read mode with every number of streams.
///
/// # Errors
/// If the model cannot be read, or there is not enough memory or disk.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let directory = tempfile::tempdir_in(config.model.parent().unwrap_or(Path::new(".")))?;
    let side = |percent, readahead, bytes_per_s| {
        StreamedSide::open(
            &config.model,
            directory.path(),
            cores,
            ReadMode { percent, readahead, bytes_per_s },
        )
    };
    let mut resident = side(100, Readahead::Next, None)?;
    let mut rows = Vec::new();
    for percent in BOUNDS.into_iter().filter(|percent| *percent < 100) {
        let mut ahead = side(percent, Readahead::Next, None)?;
        let mut std = side(percent, Readahead::Nothing, None)?;
        for streams in STREAMS {
            let sides = [&mut ahead, &mut resident, &mut std];
            rows.extend(compare(&format!("{percent} % of memory"), streams, sides, config.runs)?);
        }
        if percent == 50 {
            rows.extend(history::run(&mut ahead, directory.path(), config.runs)?);
        }
    }
    let bytes_per_s = NonZeroU64::new(SLOW);
    let mut slow = side(50, Readahead::Next, bytes_per_s)?;
    let mut std = side(50, Readahead::Nothing, bytes_per_s)?;
    for streams in STREAMS {
        let case = "50 % of memory, emulated disk of 100 MiB/s";
        rows.extend(compare(case, streams, [&mut slow, &mut resident, &mut std], config.runs)?);
    }
    drop((slow, resident, std));
    rows.extend(drafted::run(config, cores, directory.path())?);
    Ok(rows)
}

/// Compares a read mode with all weights in memory, with loading and computing in turns, and with the bytes
/// of a pass.
fn compare(
    case: &str,
    streams: usize,
    sides: [&mut StreamedSide; 3],
    runs: usize,
) -> Result<Vec<Comparison>> {
    let [ahead, resident, std] = sides;
    let (mut ours, mut memory, mut load) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runs {
        ours.push(ahead.decode(streams)?);
        memory.push(resident.decode(streams)?);
        load.push(std.decode(streams)?);
    }
    let case = format!("{case}, {streams} streams");
    let ideal = ahead.sweep_bytes as f64 / f64::from(1 << 20) / streams as f64;
    let row = |what: &str, unit, better, ours: Samples, name: &str, samples, target| Comparison {
        bench: "stream",
        case: format!("{case}: {what}"),
        unit,
        better,
        ours,
        rival: PeerSamples { name: name.to_owned(), format: "as packed".to_owned(), samples },
        target,
    };
    let of =
        |measured: &[StreamMeasurement], figure: fn(&StreamMeasurement) -> f64| Samples::of(measured, figure);
    let tokens = |rival, measured: &[StreamMeasurement]| -> Result<Comparison> {
        let rate = |measured: &StreamMeasurement| measured.tokens_per_s;
        Ok(row("tokens", "tokens/s", Better::Higher, of(&ours, rate)?, rival, of(measured, rate)?, None))
    };
    Ok(vec![
        tokens("all in memory", &memory)?,
        tokens("load, then compute", &load)?,
        row(
            "bytes read",
            "MiB/token",
            Better::Lower,
            of(&ours, |measured| measured.mib_per_token)?,
            "a sweep, shared",
            Samples::new(vec![ideal])?,
            Some(BenchTarget::ShareAtMost(1.1)),
        ),
        row(
            "reading, of the time",
            "%",
            Better::Higher,
            of(&ours, |measured| measured.reading)?,
            "load, then compute",
            of(&load, |measured| measured.reading)?,
            None,
        ),
        row(
            "reading that was hidden",
            "%",
            Better::Higher,
            of(&ours, |measured| measured.hidden)?,
            "load, then compute",
            of(&load, |measured| measured.hidden)?,
            None,
        ),
    ])
}
