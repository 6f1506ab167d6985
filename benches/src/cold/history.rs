//! Gain of the disk tier (E-28): resumption of an offloaded long conversation, and many conversations on a
//! device that holds a quarter of them, beside the same executor without the tier.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::{runtime::Builder, time::sleep};

use super::{ColdCompute, ColdExecutor, ExecutorPlacement, Mode, arrivals::RequestArrival, conversations};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

/// Capacity for one long conversation and hardly a second.
const ONE_BYTES: u64 = 64 << 20;
const LONG_TOKENS: usize = 2000;
/// Target: resumption is this many times as fast as computation.
const RESUMED: f64 = 5.0;

/// Conversations, tokens that each turn adds, and turns of each conversation.
const CONVERSATIONS: usize = 24;
const TURN_TOKENS: usize = 96;
const TURNS: usize = 8;
/// A quarter of the last turns: 24 x 768 tokens take 432 MiB.
const QUARTER_BYTES: u64 = 108 << 20;
const TTFT_SHARE: f64 = 0.6;
const PREFILL_SHARE: f64 = 0.7;

const DISK: [&str; 2] = ["--disk-bytes", "2GiB"];

pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let runtime = Builder::new_current_thread().enable_all().build().context("no runtime")?;
    runtime.block_on(measure(config, cores))
}

async fn measure(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let (disk, none) = (DISK.map(str::to_owned), []);
    let base = ExecutorPlacement {
        base_cores: cores.numbers(),
        helper: ColdCompute::Nobody,
        ..ExecutorPlacement::on(config, cores)?
    };
    let place = |options, kv_bytes| ExecutorPlacement { options, kv_bytes, ..base };
    let mut comparisons = vec![resumed(place(&disk, ONE_BYTES), config.runs).await?];
    let mut sides = Vec::new();
    for options in [&disk[..], &none[..]] {
        sides.push(turns(place(options, QUARTER_BYTES)).await?);
    }
    let (Some(without), Some(with)) = (sides.pop(), sides.pop()) else { return Ok(comparisons) };
    comparisons.push(comparison(
        format!("{CONVERSATIONS} conversations of {TURNS} turns, room for a quarter: first token"),
        ("ms", Samples::new(with.first_ms)?, Samples::new(without.first_ms)?),
        BenchTarget::ShareAtMost(TTFT_SHARE),
    ));
    comparisons.push(comparison(
        "the same: prompt tokens computed".to_owned(),
        ("tokens", Samples::new(vec![with.computed])?, Samples::new(vec![without.computed])?),
        BenchTarget::ShareAtMost(PREFILL_SHARE),
    ));
    comparisons.extend(conversations::measure(config, base).await?);
    Ok(comparisons)
}

fn comparison(
    case: String,
    (unit, ours, rival): (&'static str, Samples, Samples),
    target: BenchTarget,
) -> Comparison {
    let rival =
        PeerSamples { name: "holobiont, no disk tier".to_owned(), format: "Q4_1".to_owned(), samples: rival };
    Comparison { bench: "cache", case, unit, better: Better::Lower, ours, rival, target: Some(target) }
}

/// Measures the first token of an offloaded conversation beside that of its first computation.
async fn resumed(place: ExecutorPlacement<'_>, runs: usize) -> Result<Comparison> {
    let mut executor = ColdExecutor::start(place, Mode::CpuAssist).await?;
    // Warm-up: costs of the first request.
    first_ms(&mut executor, LONG_TOKENS, 0).await?;
    let [mut computed, mut resumed] = [Vec::new(), Vec::new()];
    for run in 1..=runs as u64 + 1 {
        computed.push(first_ms(&mut executor, LONG_TOKENS, run).await?);
        keep_all(&mut executor).await?;
        if run > 1 {
            // The computation before has evicted this conversation.
            resumed.push(first_ms(&mut executor, LONG_TOKENS, run - 1).await?);
        }
    }
    Ok(comparison(
        format!("first token of a conversation of {LONG_TOKENS} tokens, from the disk beside computed"),
        ("ms", Samples::new(resumed)?, Samples::new(computed)?),
        BenchTarget::RatioAtLeast(RESUMED),
    ))
}

async fn keep_all(executor: &mut ColdExecutor) -> Result<()> {
    let mut before = None;
    loop {
        let spilled = executor.stats().await?.memory.spilled_blocks;
        if before == Some(spilled) {
            return Ok(());
        }
        before = Some(spilled);
        sleep(Duration::from_millis(200)).await;
    }
}

struct TurnResult {
    /// Times to first token of all turns but the first.
    first_ms: Vec<f64>,
    computed: f64,
}

async fn turns(place: ExecutorPlacement<'_>) -> Result<TurnResult> {
    let mut executor = ColdExecutor::start(place, Mode::CpuAssist).await?;
    let mut first = Vec::new();
    for turn in 1..=TURNS {
        for conversation in 0..CONVERSATIONS {
            let took = first_ms(&mut executor, turn * TURN_TOKENS, conversation as u64).await?;
            if turn > 1 {
                first.push(took);
            }
        }
    }
    Ok(TurnResult { first_ms: first, computed: executor.stats().await?.prompt_tokens as f64 })
}

/// Time to first token of a prompt. Prompts of one seed share their beginning.
async fn first_ms(executor: &mut ColdExecutor, prompt: usize, seed: u64) -> Result<f64> {
    let arrival = RequestArrival { at: Duration::ZERO, adapter: None, prompt, answer: 1, seed };
    let served = executor.serve(&[arrival]).await?;
    let first = served.first().context("a request was lost")?.first;
    Ok(first.as_secs_f64() * 1e3)
}
