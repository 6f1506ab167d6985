//! Requests to the servers: the same token ids on both sides, and never a prompt twice.

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

const PROMPT_TOKENS: usize = 128;
const GENERATED_TOKENS: usize = 64;
/// Prompt tokens of [`first_token`]: few, so that the start is measured and not a prefill.
const SHORT_PROMPT_TOKENS: usize = 8;
/// Prompt tokens of an [`arrival`], and its generated tokens on average.
const ARRIVAL_TOKENS: usize = 32;
pub(crate) const STREAMS: usize = 8;

/// Round number of warm-up prompts, which no measured round uses.
pub(crate) const WARM_UP_ROUND: usize = 1_000_000;

/// Ids from here on are words in every tokenizer; control tokens have lower ids.
pub(crate) const FIRST_WORD: u32 = 1000;
/// One past the last id in use: below the vocabulary size of every model in use.
pub(crate) const LAST_WORD: u32 = 30_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdapterChoice {
    Base,
    /// Index of the adapter in the order of loading.
    Adapter(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BenchRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) who: AdapterChoice,
    pub(crate) generate: usize,
    pub(crate) says: AnswerKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerKind {
    Anything,
    /// One token repeated, so that a later prompt can extend the answer.
    Token(u32),
    Form,
}

/// JSON schema of a list of objects that is longer than any answer here, so that all answers have as many
/// tokens.
pub(crate) fn form() -> Value {
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 20 },
            "kind": { "enum": ["cat", "dog", "bird"] },
            "age": { "type": "integer", "minimum": 0, "maximum": 30 },
            "tags": { "type": "array", "items": { "type": "string", "pattern": "^[a-z]{1,12}$" }, "maxItems": 4 }
        },
        "required": ["name", "kind", "age", "tags"],
        "additionalProperties": false
    });
    json!({ "type": "array", "items": person, "minItems": 50 })
}

/// Requests of one burst: [`STREAMS`] on the base, or on an adapter each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BurstMix {
    Base,
    Adapters,
}

/// Returns the burst of round `round`. No two prompts of a run share their first block, so that no prefix
/// cache helps.
pub(crate) fn burst(mix: BurstMix, round: usize) -> Vec<BenchRequest> {
    (0..STREAMS)
        .map(|stream| BenchRequest {
            prompt: prompt(seed(mix, round, stream), PROMPT_TOKENS),
            who: match mix {
                BurstMix::Base => AdapterChoice::Base,
                BurstMix::Adapters => AdapterChoice::Adapter(stream),
            },
            generate: GENERATED_TOKENS,
            says: AnswerKind::Anything,
        })
        .collect()
}

pub(crate) fn first_token(round: usize) -> BenchRequest {
    let prompt = prompt(seed(BurstMix::Base, round, STREAMS), SHORT_PROMPT_TOKENS);
    BenchRequest { prompt, who: AdapterChoice::Base, generate: 1, says: AnswerKind::Anything }
}

/// Returns arrival `number` of loop `round`: a short request on one of the adapters. Answer lengths differ,
/// since requests of equal length that begin together would always end together.
pub(crate) fn arrival(round: usize, number: usize) -> BenchRequest {
    let who = AdapterChoice::Adapter(number % STREAMS);
    let seed = (1 << 40) + ((round << 24) + number) as u64;
    let generate = StdRng::seed_from_u64(!seed).random_range(1..2 * ARRIVAL_TOKENS);
    BenchRequest { prompt: prompt(seed, ARRIVAL_TOKENS), who, generate, says: AnswerKind::Anything }
}

fn seed(mix: BurstMix, round: usize, stream: usize) -> u64 {
    let mix = match mix {
        BurstMix::Base => 0,
        BurstMix::Adapters => 1,
    };
    ((round * (STREAMS + 1) + stream) * 2 + mix) as u64
}

pub(crate) fn prompt(seed: u64, tokens: usize) -> Vec<u32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..tokens).map(|_| random.random_range(FIRST_WORD..LAST_WORD)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_prompts_begin_alike_and_every_run_asks_the_same() {
        let jobs = || {
            (0..20)
                .flat_map(|round| [burst(BurstMix::Base, round), burst(BurstMix::Adapters, round)].concat())
        };
        let beginnings: HashSet<Vec<u32>> = jobs().map(|job| job.prompt[..4].to_vec()).collect();
        assert_eq!(beginnings.len(), 20 * 2 * STREAMS);
        assert!(jobs().eq(jobs()));
    }

    #[test]
    fn a_burst_on_adapters_uses_each_once() {
        let who: Vec<AdapterChoice> = burst(BurstMix::Adapters, 0).iter().map(|job| job.who).collect();
        assert_eq!(who, (0..STREAMS).map(AdapterChoice::Adapter).collect::<Vec<_>>());
    }
}
