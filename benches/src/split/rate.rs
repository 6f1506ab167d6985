//! `split`: decode speed of one client over the executor's layers, and the overhead of a call.
//!
//! The peer is the resident engine's own pass (`base-executor bench`), on the same cores in the same run: the
//! speed without the split.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result};
use client::{
    masking::Masking,
    session::{Session, calls::LayerCall},
};
use model::linear_sites::SiteId;
use shmproto::layer::{CallClass, SiteOp, SitePath};

use super::{
    SplitRow,
    executor::{BatchingFlag, CallTransport, SplitExecutor},
    model::{Decoder, time_of_a_token},
    watch::CallWatcher,
};
use crate::{
    config::SuiteConfig,
    holobiont_runner::{BenchProgram, HolobiontRunner as _, SyntheticLoad},
    machine::Cores,
    measure::{Contestant, Samples, alternate},
    report::{BenchTarget, Better, Comparison},
};

const BENCH: &str = "split";
const LOAD: SyntheticLoad = SyntheticLoad { prompt_tokens: 16, generated_tokens: 128, streams: 1 };
/// Counted passes, and warm-up passes before them.
const PASSES: usize = 80;
const WARM_UP_PASSES: usize = 20;
/// Targets per transport: share of the resident engine's rate, and overhead of a call in microseconds.
const GOALS: [(CallTransport, Option<f64>, Option<f64>); 3] = [
    (CallTransport::Channel, Some(0.5), Some(25.0)),
    (CallTransport::Ipc, None, None),
    (CallTransport::Tls, Some(0.15), Some(150.0)),
];
/// Sites of a block in the order of their numbers; the head comes last.
const GROUPS: [&str; 5] = ["qkv", "o", "gate and up", "down", "head"];

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let executor = SplitExecutor::start(config, cores.numbers(), BatchingFlag::Opportunistic)?;
    let mut comparisons = rates(config, &executor)?;
    for (way, _, goal_us) in GOALS {
        comparisons.push(overhead(config, &executor, way, goal_us)?);
    }
    Ok(comparisons)
}

/// Compares tokens per second over each transport with the resident engine's.
fn rates(config: &SuiteConfig, executor: &SplitExecutor) -> Result<Vec<Comparison>> {
    let resident = BenchProgram::new(&config.ours, &config.model, config.threads);
    let [channel, ipc, tls] = CallTransport::EACH.map(|way| decoder(&config.model, executor, way));
    let measured = alternate(
        config.runs,
        [
            Box::new(|_| Ok(resident.rates(LOAD)?.decode_tokens_per_s)) as Contestant<'_, f64>,
            contestant(channel?),
            contestant(ipc?),
            contestant(tls?),
        ],
    )?;
    let [resident, channel, ipc, tls] = measured.map(Samples::new);
    let resident = resident?;
    let row = |((way, goal, _), samples): ((CallTransport, Option<f64>, _), Result<Samples>)| {
        let row = SplitRow {
            bench: BENCH,
            case: format!("one stream over {}", way.name()),
            unit: "tokens/s",
            better: Better::Higher,
            target: goal.map(BenchTarget::ShareAtLeast),
        };
        Ok(row.beside(&samples?, "the resident engine", &resident))
    };
    GOALS.into_iter().zip([channel, ipc, tls]).map(row).collect()
}

fn decoder(model: &Path, executor: &SplitExecutor, way: CallTransport) -> Result<Decoder> {
    let off = Masking::Off { path: SitePath::Fast };
    Decoder::new(model, executor.session(way, off.as_str(), None)?, off)
}

/// Decodes once before each measurement, as the resident engine does.
fn contestant<'a>(mut decoder: Decoder) -> Contestant<'a, f64> {
    let SyntheticLoad { prompt_tokens, generated_tokens, .. } = LOAD;
    Box::new(move |round| {
        let seed = 2 * round as u64;
        decoder.generate(seed, prompt_tokens, generated_tokens / 8)?;
        let generated = decoder.generate(seed + 1, prompt_tokens, generated_tokens)?;
        Ok(1.0 / time_of_a_token(&generated).as_secs_f64())
    })
}

/// Overhead of a one-row call beyond the executor's computation: a mean over the calls of each pass.
fn overhead(
    config: &SuiteConfig,
    executor: &SplitExecutor,
    way: CallTransport,
    goal_us: Option<f64>,
) -> Result<Comparison> {
    let watcher = CallWatcher::default();
    let session = executor.session(way, "off", Some(&watcher))?;
    let mut caller = SiteCaller::new(session)?;
    for _ in 0..WARM_UP_PASSES {
        caller.pass()?;
    }
    watcher.drain();
    let (mut overheads, mut computed) = (Vec::new(), Vec::new());
    let mut groups: [Vec<f64>; GROUPS.len()] = Default::default();
    for _ in 0..PASSES * config.runs {
        let before = caller.session.stats()?.compute_us;
        caller.pass()?;
        let after = caller.session.stats()?.compute_us;
        let seen = watcher.drain();
        let calls = seen.len().max(1) as f64;
        let took: Duration = seen.iter().map(|seen| seen.took).sum();
        computed.push((after - before) as f64 / calls);
        overheads.push(took.as_secs_f64() * 1e6 / calls - (after - before) as f64 / calls);
        for seen in &seen {
            groups[caller.group(seen.site)].push(seen.took.as_secs_f64() * 1e6);
        }
    }
    report_groups(way, groups)?;
    let row = SplitRow {
        bench: BENCH,
        case: format!("a call of one row over {}, besides computing", way.name()),
        unit: "us",
        better: Better::Lower,
        target: goal_us.map(BenchTarget::OursAtMost),
    };
    Ok(row.beside(&Samples::new(overheads)?, "computing a call", &Samples::new(computed)?))
}

fn report_groups(way: CallTransport, groups: [Vec<f64>; GROUPS.len()]) -> Result<()> {
    for (name, group) in GROUPS.iter().zip(groups) {
        let samples = Samples::new(group)?;
        let (median, tail) = (samples.median(), samples.quantile(0.99));
        eprintln!(
            "holobiont-bench: a call of {name} over {}: median {median:.1} us, p99 {tail:.1} us",
            way.name()
        );
    }
    Ok(())
}

/// Calls the sites in the order of a pass, with one meaningless row.
#[derive(Debug)]
struct SiteCaller {
    session: Session,
    rows: Vec<(Vec<f32>, Vec<f32>)>,
}

impl SiteCaller {
    fn new(session: Session) -> Result<Self> {
        let rows = super::load::rows(&session, 1);
        anyhow::ensure!(rows.len() % 4 == 1, "the model's sites are not those of a known architecture");
        Ok(Self { session, rows })
    }

    fn pass(&mut self) -> Result<()> {
        for (site, (x, out)) in (0..).zip(&mut self.rows) {
            let (op, path, class) = (SiteOp::Forward, SitePath::Fast, CallClass::Decode);
            let ask = LayerCall { site: SiteId(site), part: None, op, path, class };
            self.session.call(ask, x, out).context("a call was not answered")?;
        }
        Ok(())
    }

    fn group(&self, site: u32) -> usize {
        let (site, head) = (site as usize, self.rows.len() - 1);
        if site == head { GROUPS.len() - 1 } else { site % 4 }
    }
}
