//! One stream: tokens per second from an empty context, in the definition of `llama-bench -p 0 -n 128`.

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

const LOAD: SyntheticLoad = SyntheticLoad { prompt_tokens: 1, generated_tokens: 128, streams: 1 };

/// Compares ours with llama-bench on the same file and on Q4_0.
pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let contest = PeerComparison {
        bench: "decode",
        case: "one stream".to_owned(),
        unit: "tokens/s",
        better: Better::Higher,
        rival: "llama-bench",
        targets: [Some(BenchTarget::RatioAtLeast(1.8)), None],
    };
    let entries = ContestantResults::measure(
        setup,
        |_| Ok(setup.ours.rates(LOAD)?.decode_tokens_per_s),
        |weights, _| setup.peer.decode(weights, LOAD.generated_tokens),
    )?;
    let limit = setup.limit(|limits, work| limits.decode(work, LOAD.streams))?;
    let share = share("decode", contest.case.clone(), Samples::new(entries.ours.clone())?, limit, Some(0.85));
    let mut comparisons = entries.compare(setup, &contest, |rate| *rate)?;
    comparisons.push(share);
    Ok(comparisons)
}
