//! 1 to 16 streams of the base: total tokens per second, in the definition of `llama-batched-bench`.

use anyhow::Result;

use super::{
    peer_compare::{ContestantResults, PeerComparison},
    setup::Setup,
};
use crate::{
    holobiont_runner::SyntheticLoad,
    limits::share,
    measure::Samples,
    report::{BenchTarget, Better, Comparison},
};

const STREAMS: [usize; 4] = [1, 4, 8, 16];
const PROMPT_TOKENS: usize = 128;
const GENERATED_TOKENS: usize = 64;
/// Target at the largest number of streams, against the peer's fastest format.
const TARGET: BenchTarget = BenchTarget::RatioAtLeast(1.5);

/// Compares ours with llama-batched-bench on the same file and on Q4_0, for each number of streams.
pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let entries = ContestantResults::measure(
        setup,
        |_| ours(setup),
        |weights, _| setup.peer.batched(weights, &STREAMS, PROMPT_TOKENS, GENERATED_TOKENS),
    )?;
    let mut comparisons = Vec::new();
    for (index, streams) in STREAMS.into_iter().enumerate() {
        let contest = PeerComparison {
            bench: "batch",
            case: format!("base streams: {streams}"),
            unit: "tokens/s",
            better: Better::Higher,
            rival: "llama-batched-bench",
            targets: [None, (streams == STREAMS[STREAMS.len() - 1]).then_some(TARGET)],
        };
        comparisons.extend(entries.compare(setup, &contest, |rates| rates[index])?);
        let limit = setup.limit(|limits, work| limits.decode(work, streams))?;
        let ours = Samples::of(&entries.ours, |rates| rates[index])?;
        comparisons.push(share("batch", contest.case, ours, limit, None));
    }
    Ok(comparisons)
}

fn ours(setup: &Setup) -> Result<Vec<f64>> {
    STREAMS
        .into_iter()
        .map(|streams| {
            let load =
                SyntheticLoad { prompt_tokens: PROMPT_TOKENS, generated_tokens: GENERATED_TOKENS, streams };
            Ok(setup.ours.rates(load)?.decode_tokens_per_s)
        })
        .collect()
}
