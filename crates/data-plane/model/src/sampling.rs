//! Choice of the next token from a row of logits.
//!
//! The order of the steps is that of Hugging Face's `generation/utils.py` (`_get_logits_processor`), with
//! OpenAI's additions in front: logit bias, repetition penalty, presence and frequency penalties,
//! temperature, top-k, top-p, min-p, draw. After the temperature every filter keeps a prefix of the tokens
//! sorted by probability. All filters together keep the shortest of their prefixes, so the whole vocabulary
//! is never sorted.
//!
//! Draws come from a counter-based generator: the random number is a hash of (seed, position). A request that
//! is repeated after a crash draws the same numbers without a saved generator state.
//!
//! A NaN logit counts as minus infinity: a broken row yields some token, never a panic.

mod candidates;
mod request;
mod softmax;

use std::collections::HashMap;

use candidates::Candidates;
pub use request::{
    Drawn, LOGIT_BIAS_RANGE, PENALTY_RANGE, Probability, Sampling, SamplingError, SamplingParams, TokenDraw,
};
use scheduling::random::Rng;
pub use softmax::LOGPROB_FLOOR;
use softmax::{LogSoftmax, Scale, TokenWeights};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Occurrences {
    prompt: u32,
    completion: u32,
}

/// Token counts of a sequence, for the penalties.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenCounts {
    seen: HashMap<u32, Occurrences>,
}

impl TokenCounts {
    /// Returns the counts of `prompt` with an empty completion.
    #[must_use]
    pub fn of_prompt(prompt: &[u32]) -> Self {
        let mut counts = Self::default();
        for &token in prompt {
            counts.seen.entry(token).or_default().prompt += 1;
        }
        counts
    }

    /// Counts one more token of the completion.
    pub fn push_completion(&mut self, token: u32) {
        self.seen.entry(token).or_default().completion += 1;
    }
}

/// Chooses a token; `logits` (one per token of the vocabulary, at least one) is changed on the way.
///
/// `position` is the chosen token's position in the sequence; seed and position fix the draw. `banned` tokens
/// (stop tokens before `min_tokens`) are chosen only if no other token is left.
///
/// # Panics
/// If `logits` is empty: a programmer's error.
#[must_use]
pub fn sample(
    logits: &mut [f32],
    params: &SamplingParams,
    history: &TokenCounts,
    position: u64,
    banned: &[u32],
) -> u32 {
    assert!(!logits.is_empty(), "a model has at least one token");
    let request = params.request();
    add_bias(logits, &request.logit_bias);
    penalize(logits, request, history);
    for &token in banned {
        set(logits, token, |_| f32::NEG_INFINITY);
    }
    let best = softmax::clean_and_find_best(logits);
    if request.temperature == 0.0 {
        return best;
    }
    let scale = Scale::new(logits, best, request.temperature);
    let draw = Rng::seeded(request.seed).uniform(position);
    let drawn = match Candidates::select(logits, scale, request) {
        Some(candidates) => candidates.pick(draw),
        None => TokenWeights::new(logits, scale).pick(draw),
    };
    drawn.unwrap_or(best)
}

/// Sets the logits of all tokens outside `allowed` to minus infinity. `allowed` is a bit mask, 32 tokens a
/// word, lowest bit first; tokens behind the last word are excluded.
pub fn restrict(logits: &mut [f32], allowed: &[u32]) {
    let words = allowed.iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words) {
        match word {
            u32::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            word => {
                let out = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                out.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            }
        }
    }
}

fn set(logits: &mut [f32], token: u32, change: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = change(*logit);
    }
}

fn add_bias(logits: &mut [f32], biases: &[(u32, f32)]) {
    for &(token, bias) in biases {
        set(logits, token, |logit| logit + bias);
    }
}

/// Applies the repetition penalty of transformers' `RepetitionPenaltyLogitsProcessor` (prompt and
/// completion), then OpenAI's presence and frequency penalties (completion only).
fn penalize(logits: &mut [f32], request: &Sampling, history: &TokenCounts) {
    let repetition = request.repetition_penalty;
    for (&token, seen) in &history.seen {
        set(logits, token, |logit| {
            let repeated = if logit < 0.0 { logit * repetition } else { logit / repetition };
            if seen.completion == 0 {
                return repeated;
            }
            #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24")]
            let occurrences = seen.completion as f32;
            repeated - request.presence_penalty - request.frequency_penalty * occurrences
        });
    }
}

/// Returns log-probabilities of `chosen` and of the `top` most likely tokens, best first, lower id on ties.
///
/// The values describe the model's own distribution. Call this function with the raw logits, before
/// [`sample`] applies bias, penalties and temperature (vLLM's `raw_logprobs`). One log-softmax gives all
/// values, so a chosen token in the list has equal bits in both places.
#[must_use]
pub fn logprobs(logits: &[f32], chosen: u32, top: usize) -> (f32, Vec<(u32, f32)>) {
    let softmax = LogSoftmax::new(logits);
    let of = |token: u32| logits.get(token as usize).map_or(LOGPROB_FLOOR, |&logit| softmax.of(logit));
    let best = candidates::largest(logits, top);
    (of(chosen), best.into_iter().map(|token| (token, of(token))).collect())
}

/// Returns the log-probability of `token` as [`logprobs`] does, and the log-sum-exp of all logits.
#[must_use]
pub fn log_probability(logits: &[f32], token: u32) -> (f32, f32) {
    let softmax = LogSoftmax::new(logits);
    let value = logits.get(token as usize).map_or(LOGPROB_FLOOR, |&logit| softmax.of(logit));
    (value, softmax.log_sum())
}
