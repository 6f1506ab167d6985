//! Choosing the next token from a row of logits.
//!
//! The order of the steps is that of Hugging Face's `generation/utils.py` (`_get_logits_processor`), with OpenAI's
//! additions in front: logit bias, repetition penalty, presence and frequency penalties, temperature, top-k,
//! top-p, min-p, draw. After the temperature every filter keeps a prefix of the tokens sorted by probability, so
//! together they keep the shortest of the three prefixes; the vocabulary is never sorted as a whole.
//!
//! Draws come from a counter-based generator: the number drawn is a hash of (seed, position). A request that is
//! redone after a crash draws the same numbers without any generator state to carry over.
//!
//! A logit that is not a number counts as minus infinity: a broken row yields some token, never a panic.

mod candidates;
mod random;
mod softmax;

use std::collections::HashMap;

use candidates::Candidates;
pub use random::uniform;
use softmax::{LogSoftmax, Scale, Weights};

/// The range OpenAI documents for presence and frequency penalties, both ends included.
pub const PENALTY_RANGE: (f32, f32) = (-2.0, 2.0);
/// The range OpenAI documents for a logit bias, both ends included.
pub const LOGIT_BIAS_RANGE: (f32, f32) = (-100.0, 100.0);
/// The log-probability reported for tokens that cannot be chosen (JSON has no minus infinity; OpenAI's value).
pub const LOGPROB_FLOOR: f32 = -9999.0;

/// Why sampling parameters cannot be honoured.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A number is outside of its range or not finite.
    #[error("`{field}` is {value}, but it must be {expected}; change or omit it")]
    OutOfRange {
        /// Name of the field as the API spells it.
        field: &'static str,
        /// What was asked for.
        value: f32,
        /// The range in words.
        expected: &'static str,
    },
    /// A bias for a token the vocabulary does not have.
    #[error(
        "`logit_bias` names token {token}, but the vocabulary ends at {last}; use ids of this model's tokenizer"
    )]
    UnknownToken {
        /// The token id.
        token: u32,
        /// The largest token id of the model.
        last: usize,
    },
}

/// What a caller asks for, unchecked. The default is neutral: temperature 1, every filter and penalty off.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingRequest {
    /// Logits are divided by it; 0 is greedy.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely tokens until their probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Subtracted once from the logit of every token in the completion; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted for each occurrence in the completion; 0 is off.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or completion; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Keys the generator, together with the position.
    pub seed: u64,
}

impl Default for SamplingRequest {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// A [`SamplingRequest`] that can be honoured.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams(SamplingRequest);

impl SamplingParams {
    /// Checks `request` for a model with `vocab_size` tokens.
    ///
    /// # Errors
    /// If a value is out of range or a bias names a token that does not exist; the field is named.
    pub fn new(request: SamplingRequest, vocab_size: usize) -> Result<Self, SamplingError> {
        let penalty = PENALTY_RANGE.0..=PENALTY_RANGE.1;
        let r = &request;
        let check = |field, value: f32, ok, expected| {
            if ok { Ok(()) } else { Err(SamplingError::OutOfRange { field, value, expected }) }
        };
        let t = r.temperature;
        check("temperature", t, t.is_finite() && t >= 0.0, "a finite number, 0 or more")?;
        check("top_p", r.top_p, r.top_p > 0.0 && r.top_p <= 1.0, "more than 0 and at most 1")?;
        check("min_p", r.min_p, (0.0..=1.0).contains(&r.min_p), "between 0 and 1")?;
        check(
            "presence_penalty",
            r.presence_penalty,
            penalty.contains(&r.presence_penalty),
            "between -2 and 2",
        )?;
        check(
            "frequency_penalty",
            r.frequency_penalty,
            penalty.contains(&r.frequency_penalty),
            "between -2 and 2",
        )?;
        let repetition = r.repetition_penalty;
        check(
            "repetition_penalty",
            repetition,
            repetition.is_finite() && repetition > 0.0,
            "finite and more than 0",
        )?;
        for &(token, bias) in &r.logit_bias {
            let known = LOGIT_BIAS_RANGE.0..=LOGIT_BIAS_RANGE.1;
            check("logit_bias", bias, known.contains(&bias), "between -100 and 100")?;
            if token as usize >= vocab_size {
                return Err(SamplingError::UnknownToken { token, last: vocab_size.saturating_sub(1) });
            }
        }
        Ok(Self(request))
    }

    /// What was asked for.
    #[must_use]
    pub fn request(&self) -> &SamplingRequest {
        &self.0
    }

    /// How the token at `position` is drawn by whoever has its logits; `None` if they are changed first, by penalties or
    /// biases.
    #[must_use]
    pub fn draw(&self, position: u64, probability: Probability) -> Option<Draw> {
        let &SamplingRequest { temperature, top_k, top_p, min_p, seed, .. } = &self.0;
        let is_plain = !self.needs_history() && self.0.logit_bias.is_empty();
        let uniform = uniform(seed, position);
        is_plain.then_some(Draw { temperature, top_k, top_p, min_p, uniform, probability })
    }

    /// True if [`sample`] looks at the history; otherwise an empty one does.
    #[must_use]
    pub fn needs_history(&self) -> bool {
        let r = &self.0;
        r.repetition_penalty != 1.0 || r.presence_penalty != 0.0 || r.frequency_penalty != 0.0
    }
}

/// Whether the probability of a token is wanted besides the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probability {
    /// It is.
    Wanted,
    /// It is not.
    Unwanted,
}

/// How a token is drawn from its logits alone; the fields are those of [`SamplingRequest`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "said where they come from")]
pub struct Draw {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    /// What [`uniform`] gives for seed and position.
    pub uniform: f64,
    /// Whether the token's log-probability is wanted.
    pub probability: Probability,
}

/// A token that was drawn where its logits are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    /// Which.
    pub token: u32,
    /// As [`logprobs`] has it; unspecified if it was not wanted.
    pub logprob: f32,
}

/// How often a token occurs in a sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Occurrences {
    prompt: u32,
    completion: u32,
}

/// The tokens of a sequence, counted, as penalties need them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenCounts {
    seen: HashMap<u32, Occurrences>,
}

impl TokenCounts {
    /// Counts of `prompt` with an empty completion.
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

    /// Times `token` occurs in the prompt.
    #[must_use]
    pub fn in_prompt(&self, token: u32) -> u32 {
        self.seen.get(&token).map_or(0, |seen| seen.prompt)
    }

    /// Times `token` occurs in the completion.
    #[must_use]
    pub fn in_completion(&self, token: u32) -> u32 {
        self.seen.get(&token).map_or(0, |seen| seen.completion)
    }
}

/// Chooses a token; `logits` (one per token of the vocabulary, at least one) is changed on the way.
///
/// `position` is the position in the sequence the token will take; with the seed it fixes the draw. `banned`
/// tokens are not chosen (stop tokens before `min_tokens`) unless there is nothing else.
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
    let request = &params.0;
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
    let draw = uniform(request.seed, position);
    let drawn = match Candidates::select(logits, scale, request) {
        Some(candidates) => candidates.pick(draw),
        None => Weights::new(logits, scale).pick(draw),
    };
    drawn.unwrap_or(best)
}

/// Changes the logit of `token`, if there is one.
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

/// Repetition penalty as in `RepetitionPenaltyLogitsProcessor` of transformers (prompt and completion), then
/// OpenAI's presence and frequency penalties (completion only).
fn penalize(logits: &mut [f32], request: &SamplingRequest, history: &TokenCounts) {
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

/// Log-probabilities of the `chosen` token and of the `top` most likely ones, best first, lower id first on ties.
///
/// They are of the model's own distribution: call this with the raw logits, before [`sample`] has applied bias,
/// penalties and temperature (vLLM's `raw_logprobs`). All values come from one log-softmax, so where the chosen
/// token is in the list its value there is bit-equal to the returned one.
#[must_use]
pub fn logprobs(logits: &[f32], chosen: u32, top: usize) -> (f32, Vec<(u32, f32)>) {
    let softmax = LogSoftmax::new(logits);
    let of = |token: u32| logits.get(token as usize).map_or(LOGPROB_FLOOR, |&logit| softmax.of(logit));
    let best = candidates::largest(logits, top);
    (of(chosen), best.into_iter().map(|token| (token, of(token))).collect())
}
