//! One prompt of 512 tokens: tokens per second, in the definition of `llama-bench -p 512 -n 0`.

use anyhow::Result;

use super::{
    peer_compare::{ContestantResults, PeerComparison},
    setup::Setup,
};
use crate::{
    holobiont_runner::SyntheticLoad,
    limits::{MachineLimits, share},
    measure::Samples,
    report::{BenchTarget, Better, Comparison},
};

const LOAD: SyntheticLoad = SyntheticLoad { prompt_tokens: 512, generated_tokens: 0, streams: 1 };

/// Compares ours with llama-bench on the same file and on Q4_0.
pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let contest = PeerComparison {
        bench: "prefill",
        case: format!("{} tokens", LOAD.prompt_tokens),
        unit: "tokens/s",
        better: Better::Higher,
        rival: "llama-bench",
        targets: [Some(BenchTarget::RatioAtLeast(8.0)), Some(BenchTarget::RatioAtLeast(2.7))],
    };
    let entries = ContestantResults::measure(
        setup,
        |_| Ok(setup.ours.rates(LOAD)?.prefill_tokens_per_s),
        |weights, _| setup.peer.prefill(weights, LOAD.prompt_tokens),
    )?;
    let limit = setup.limit(MachineLimits::prefill)?;
    let share = share("prefill", contest.case.clone(), Samples::new(entries.ours.clone())?, limit, Some(0.6));
    let mut comparisons = entries.compare(setup, &contest, |rate| *rate)?;
    comparisons.push(share);
    Ok(comparisons)
}
