//! Conversations over many adapters with memory for a quarter of them (E-28): one pool with a disk tier,
//! beside statically divided memory with history evicted by age.

use std::time::Duration;

use anyhow::{Context, Result};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use super::{ColdExecutor, ExecutorPlacement, Mode, adapters::write, arrivals::RequestArrival};
use crate::{
    config::SuiteConfig,
    measure::Samples,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

/// Each adapter has one conversation at a time, with this many turns, each adding this many tokens.
const ADAPTERS: usize = 100;
const RANK: usize = 16;
const TURNS: usize = 8;
const TURN_TOKENS: usize = 96;
/// A quarter of the last turns' KV cache (100 x 768 tokens, 1,687 MiB), and a quarter of all adapters.
const KV_BYTES: u64 = 422 << 20;
const ADAPTER_BYTES: u64 = 66 << 20;
const ALL_BYTES: u64 = KV_BYTES + ADAPTER_BYTES;

/// Open-loop load: time per rate, first rate, and factor from one rate to the next.
const LENGTH: Duration = Duration::from_secs(30);
const FIRST_RATE: f64 = 2.5;
const STEP: f64 = 1.2;
/// Maximum mean time to first token of a load that counts as served.
const SERVED_MS: f64 = 500.0;

/// Targets: mean time to first token, computed prompt tokens, and highest served rate.
const TTFT_SHARE: f64 = 0.6;
const PREFILL_SHARE: f64 = 0.7;
const RATE_RATIO: f64 = 1.3;

pub(super) async fn measure(config: &SuiteConfig, base: ExecutorPlacement<'_>) -> Result<Vec<Comparison>> {
    let folder = tempfile::tempdir().context("no folder for adapters")?;
    let adapters = write(&config.model, RANK, ADAPTERS, folder.path())?;
    let all = ALL_BYTES.to_string();
    let one_pool = ["--device-bytes", &all, "--disk-bytes", "4GiB"].map(str::to_owned);
    let divided = ["--cache-policy", "lru"].map(str::to_owned);
    let ours = ExecutorPlacement { options: &one_pool, kv_bytes: ALL_BYTES, device_bytes: ALL_BYTES, ..base };
    let rival =
        ExecutorPlacement { options: &divided, kv_bytes: KV_BYTES, device_bytes: ADAPTER_BYTES, ..base };
    let mut sides = Vec::new();
    for place in [ours, rival] {
        let mut executor = ColdExecutor::start(place, Mode::CpuAssist).await?;
        executor.load(&adapters).await?;
        sides.push(run_conversations(&mut executor).await?);
    }
    let (Some(rival), Some(ours)) = (sides.pop(), sides.pop()) else { return Ok(Vec::new()) };
    let case = format!("{ADAPTERS} adapters, each a conversation of {TURNS} turns");
    let lines = [
        (
            "mean time to first token",
            "ms",
            [ours.mean_ms, rival.mean_ms],
            BenchTarget::ShareAtMost(TTFT_SHARE),
        ),
        (
            "prompt tokens computed",
            "tokens",
            [ours.computed, rival.computed],
            BenchTarget::ShareAtMost(PREFILL_SHARE),
        ),
        (
            "rate with first tokens in time",
            "requests/s",
            [ours.peak, rival.peak],
            BenchTarget::RatioAtLeast(RATE_RATIO),
        ),
    ];
    let comparison = |(what, unit, sides, target): (_, _, [f64; 2], _)| {
        let [ours, rival] = sides.map(|value| Samples::new(vec![value]));
        let name = "holobiont, divided memory, lru, no disk".to_owned();
        Ok(Comparison {
            bench: "cache",
            case: format!("{case}: {what}"),
            unit,
            better: if unit == "requests/s" { Better::Higher } else { Better::Lower },
            ours: ours?,
            rival: PeerSamples { name, format: "Q4_1".to_owned(), samples: rival? },
            target: Some(target),
        })
    };
    lines.into_iter().map(comparison).collect()
}

struct ConversationResult {
    mean_ms: f64,
    computed: f64,
    peak: f64,
}

async fn run_conversations(executor: &mut ColdExecutor) -> Result<ConversationResult> {
    let mut random = StdRng::seed_from_u64(1);
    let mut first_ms = Vec::new();
    for turn in 1..=TURNS {
        for adapter in shuffled(&mut random) {
            let served = executor.serve(&[request(Duration::ZERO, adapter, turn, 0)]).await?;
            // Both sides compute the first turn, so it does not count.
            first_ms
                .extend(served.iter().filter(|_| turn > 1).map(|served| served.first.as_secs_f64() * 1e3));
        }
    }
    let computed = executor.stats().await?.prompt_tokens as f64;
    Ok(ConversationResult {
        mean_ms: Samples::new(first_ms)?.mean(),
        computed,
        peak: peak(executor, &mut random).await?,
    })
}

fn shuffled(random: &mut StdRng) -> Vec<usize> {
    let mut order: Vec<(u64, usize)> = (0..ADAPTERS).map(|adapter| (random.random(), adapter)).collect();
    order.sort_unstable();
    order.into_iter().map(|(_, adapter)| adapter).collect()
}

/// Returns the highest rate at which first tokens come in time.
async fn peak(executor: &mut ColdExecutor, random: &mut StdRng) -> Result<f64> {
    // Current turn and conversation number of each adapter.
    let mut talks = [(0, 1); ADAPTERS];
    let (mut rate, mut served_rate) = (FIRST_RATE, 0.0);
    loop {
        let mut arrivals = Vec::new();
        let mut at = 0.0;
        while at < LENGTH.as_secs_f64() {
            let adapter = random.random_range(0..ADAPTERS);
            let (turn, talk) = &mut talks[adapter];
            (*turn, *talk) = if *turn == TURNS { (1, *talk + 1) } else { (*turn + 1, *talk) };
            arrivals.push(request(Duration::from_secs_f64(at), adapter, *turn, *talk));
            at -= (1.0 - random.random::<f64>()).ln() / rate;
        }
        let served = executor.serve(&arrivals).await?;
        let first_ms = served.iter().map(|served| served.first.as_secs_f64() * 1e3).collect();
        if Samples::new(first_ms)?.mean() > SERVED_MS {
            return Ok(served_rate);
        }
        served_rate = rate;
        rate *= STEP;
    }
}

/// Request for turn `turn` of the adapter's conversation number `talk`; its prompt extends that of the turn
/// before.
fn request(at: Duration, adapter: usize, turn: usize, talk: u64) -> RequestArrival {
    let seed = talk * ADAPTERS as u64 + adapter as u64;
    RequestArrival { at, adapter: Some(adapter), prompt: turn * TURN_TOKENS, answer: 1, seed }
}
