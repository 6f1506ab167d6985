//! Structured output over HTTP: 16 simultaneous streams that write a list of objects, beside
//! `llama-server`'s, and beside free answers on either side.

use anyhow::Result;

use super::{
    peer_compare::{ContestantResults, PeerComparison},
    setup::Setup,
};
use crate::{
    holobiont_runner::Holobiont,
    http::{Dialect, DialectServer},
    measure::alternate,
    peer::{LlamaServer, LlamaServerOptions, PeerWeights},
    report::{BenchTarget, Better, Comparison},
    workload::{AdapterChoice, AnswerKind, BenchRequest, WARM_UP_ROUND, prompt},
};

const STREAMS: usize = 16;
/// Tokens of each prompt: few, since other streams decode during a prefill.
const PROMPT_TOKENS: usize = 16;
const GENERATED_TOKENS: usize = 64;
/// Minimum share of our tokens per second with a grammar.
const SHARE: BenchTarget = BenchTarget::OursAtLeast(0.95);

struct StructuredOutputRates {
    formed: f64,
    free: f64,
}

pub(super) fn run(setup: &Setup) -> Result<Vec<Comparison>> {
    let ours = Holobiont::start(&setup.holobiont, &[], &setup.temporary("holobiont-forms"))?;
    let (same_file, fastest) = (start(setup, &setup.peer.shipped)?, start(setup, &setup.peer.q4_0)?);
    // Warm-up: the servers compile grammars and scan vocabularies.
    rates(&ours, WARM_UP_ROUND)?;
    rates(&same_file, WARM_UP_ROUND)?;
    rates(&fastest, WARM_UP_ROUND)?;
    let [ours, same_file, fastest] = alternate(
        setup.config.runs,
        [
            Box::new(|round| rates(&ours, round)),
            Box::new(|round| rates(&same_file, round)),
            Box::new(|round| rates(&fastest, round)),
        ],
    )?;
    let entries = ContestantResults { ours, same_file, fastest };
    let formed = contest(format!("{STREAMS} streams of a form, decode"), "tokens/s", None);
    let free = contest(format!("{STREAMS} free streams, decode"), "tokens/s", None);
    let share = contest("of a form beside free".to_owned(), "share", Some(SHARE));
    let mut comparisons = entries.compare(setup, &formed, |rates| rates.formed)?;
    comparisons.extend(entries.compare(setup, &free, |rates| rates.free)?);
    comparisons.extend(entries.compare(setup, &share, |rates| rates.formed / rates.free)?);
    Ok(comparisons)
}

fn start(setup: &Setup, weights: &PeerWeights) -> Result<LlamaServer> {
    let folder = setup.temporary(&format!("llama-server-forms-{}", weights.format));
    LlamaServer::start_with(
        &setup.peer,
        weights,
        &LlamaServerOptions { slots: STREAMS, ..LlamaServerOptions::default() },
        &folder,
    )
}

fn contest(case: String, unit: &'static str, target: Option<BenchTarget>) -> PeerComparison {
    let (better, rival) = (Better::Higher, "llama-server");
    PeerComparison { bench: "forms", case, unit, better, rival, targets: [target, None] }
}

fn rates<D: Dialect>(server: &DialectServer<D>, round: usize) -> Result<StructuredOutputRates> {
    let rate = |says| server.burst(&jobs(says, round)).map(|burst| burst.decode_tokens_per_s());
    Ok(StructuredOutputRates { formed: rate(AnswerKind::Form)?, free: rate(AnswerKind::Anything)? })
}

/// Requests of a round; no prompt repeats.
fn jobs(says: AnswerKind, round: usize) -> Vec<BenchRequest> {
    let burst = 2 * round + usize::from(says == AnswerKind::Form);
    let job = |stream| BenchRequest {
        prompt: prompt((burst * STREAMS + stream) as u64, PROMPT_TOKENS),
        who: AdapterChoice::Base,
        generate: GENERATED_TOKENS,
        says,
    };
    (0..STREAMS).map(job).collect()
}
