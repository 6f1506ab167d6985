//! What the servers are asked: the same token ids on both sides, and never twice.

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

/// Tokens of a burst's prompts.
const PROMPT_TOKENS: usize = 128;
/// Tokens a burst's requests generate.
const GENERATED_TOKENS: usize = 64;
/// Tokens of the prompt of [`first_token`]: few, so that a start is measured and not a prefill.
const SHORT_PROMPT_TOKENS: usize = 8;
/// Tokens of the prompt of an [`arrival`], and tokens it generates on average.
const ARRIVAL_TOKENS: usize = 32;
/// Requests at once.
pub(crate) const STREAMS: usize = 8;

/// A round whose prompts no measured round has.
pub(crate) const WARM_UP_ROUND: usize = 1_000_000;

/// Ids from here on are words in every tokenizer; control tokens come first.
pub(crate) const FIRST_WORD: u32 = 1000;
/// One past the last id used: below every vocabulary in use.
pub(crate) const LAST_WORD: u32 = 30_000;

/// Which of a server's adapters a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdapterChoice {
    /// The base model.
    Base,
    /// The adapter of this index, in the order they were loaded.
    Adapter(usize),
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BenchRequest {
    /// The prompt.
    pub(crate) prompt: Vec<u32>,
    /// Base or adapter.
    pub(crate) who: AdapterChoice,
    /// Exactly how many tokens to generate.
    pub(crate) generate: usize,
    /// What they are to be.
    pub(crate) says: AnswerKind,
}

/// What an answer is to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerKind {
    /// Whatever the model says.
    Anything,
    /// This token again and again, so that a later prompt can go on from the answer.
    Token(u32),
    /// Something of the [`form`].
    Form,
}

/// A JSON schema: a list of objects that is longer than any answer here, so that all answers have as many tokens.
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
    /// All on the base model.
    Base,
    /// Request i on adapter i.
    Adapters,
}

/// The burst of round `round`. No two prompts of a run share their first token block, so that no prefix cache helps.
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

/// A single request for one token of the base model.
pub(crate) fn first_token(round: usize) -> BenchRequest {
    let prompt = prompt(seed(BurstMix::Base, round, STREAMS), SHORT_PROMPT_TOKENS);
    BenchRequest { prompt, who: AdapterChoice::Base, generate: 1, says: AnswerKind::Anything }
}

/// Arrival `number` of loop `round` of an open or a closed loop: short, on one of the adapters. Answers differ in length,
/// as people's do: were they all equal, requests that began together would end together for ever.
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

/// Words of seed `seed`.
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
