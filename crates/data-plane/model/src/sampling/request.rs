//! Checked sampling parameters, and their form for draws on the device.

use scheduling::random::Rng;
pub use shmproto::message::Sampling;

/// OpenAI's documented range of presence and frequency penalties, both ends included.
pub const PENALTY_RANGE: (f32, f32) = (-2.0, 2.0);
/// OpenAI's documented range of a logit bias, both ends included.
pub const LOGIT_BIAS_RANGE: (f32, f32) = (-100.0, 100.0);

/// Reasons for refusing sampling parameters.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A value is outside its range or not finite.
    #[error("`{field}` is {value}, but it must be {expected}; change or omit it")]
    OutOfRange {
        /// Name of the field in the API.
        field: &'static str,
        /// Value in the request.
        value: f32,
        /// Description of the valid range.
        expected: &'static str,
    },
    /// A bias names a token outside the vocabulary.
    #[error(
        "`logit_bias` names token {token}, but the vocabulary ends at {last}; use ids of this model's tokenizer"
    )]
    UnknownToken {
        /// Token id in the request.
        token: u32,
        /// Largest token id of the model.
        last: usize,
    },
}

/// A [`Sampling`] whose values are all valid.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams(Sampling);

impl SamplingParams {
    /// Checks `request` for a model with `vocab_size` tokens.
    ///
    /// # Errors
    /// A value is out of range, or a bias names a token that does not exist; the error names the field.
    pub fn new(request: Sampling, vocab_size: usize) -> Result<Self, SamplingError> {
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

    /// Returns the checked request.
    #[must_use]
    pub fn request(&self) -> &Sampling {
        &self.0
    }

    /// Returns the parameters for drawing the token at `position` on the device. Returns `None` if penalties
    /// or biases must change the logits first.
    #[must_use]
    pub fn draw(&self, position: u64, probability: Probability) -> Option<TokenDraw> {
        let &Sampling { temperature, top_k, top_p, min_p, seed, .. } = &self.0;
        let is_plain = !self.needs_history() && self.0.logit_bias.is_empty();
        let uniform = Rng::seeded(seed).uniform(position);
        is_plain.then_some(TokenDraw { temperature, top_k, top_p, min_p, uniform, probability })
    }

    /// True if [`sample`](super::sample) reads the history; otherwise an empty history suffices.
    #[must_use]
    pub fn needs_history(&self) -> bool {
        let r = &self.0;
        r.repetition_penalty != 1.0 || r.presence_penalty != 0.0 || r.frequency_penalty != 0.0
    }
}

/// Whether the log-probability of a drawn token is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probability {
    /// The log-probability must be computed.
    Wanted,
    /// The token alone is wanted.
    Unwanted,
}

/// Parameters for drawing a token from its logits alone; the fields are those of [`Sampling`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "said where they come from")]
pub struct TokenDraw {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    /// Random number in [0, 1) from seed and position.
    pub uniform: f64,
    /// Whether the token's log-probability is wanted.
    pub probability: Probability,
}

/// A token drawn on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    /// Id of the token in the vocabulary.
    pub token: u32,
    /// Log-probability as in [`logprobs`](super::logprobs); unspecified if it was not wanted.
    pub logprob: f32,
}
