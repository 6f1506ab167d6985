//! Losses over log-probabilities of tokens: those of Tinker by its names and formulas, DPO and KTO.
//!
//! All losses are sums over tokens, not means: a caller that wants a mean divides the weights or advantages.
//! With p the policy in training, q the policy that sampled, r = p / q, A the advantage and w the weight of a
//! token:
//!
//! | Loss | Summed over tokens | Its derivative by log p |
//! |---|---|---|
//! | `cross_entropy` | -w log p | -w |
//! | `importance_sampling` | -r A | -r A |
//! | `ppo` (Schulman et al. 2017) | -min(r A, clip(r) A) | -r A, or 0 where the clipped term is the smaller |
//! | `cispo` (MiniMax 2025) | -clip(r) A log p, with clip(r) held constant | -clip(r) A |
//! | `dro` (Richemond et al. 2024) | -(A log p - β/2 (log p - log q)²) | -(A - β (log p - log q)) |
//!
//! DPO (Rafailov et al. 2023, equation 7) is -log σ(β (c - d)) of a pair. Here c and d are the sums of w (log
//! p - log q) of the chosen and of the rejected answer, and q is the reference.
//!
//! KTO (Ethayarajh et al. 2024, equation 8) is w_d σ(β (z - c)) of a desirable answer, and w_u σ(β (c - z))
//! of an undesirable one. Here c is the sum of w (log p - log q) of the answer. The constant z is the mean of
//! such sums over prompts with answers to other prompts, and at least 0.
//!
//! All values are computed in f64 and summed in the order of the tokens.

use std::collections::BTreeMap;

/// Sums of a batch by name; as in Tinker, the name says how [`add`] combines parts, here always by a sum.
pub type LossMetrics = BTreeMap<&'static str, f64>;

/// Adds the metrics of a part to those of the whole.
pub fn add(whole: &mut LossMetrics, part: &LossMetrics) {
    for (&name, value) in part {
        *whole.entry(name).or_default() += value;
    }
}

/// Error of an unknown loss or of its options.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossError {
    #[error("the loss '{0}' is not supported; use cross_entropy, importance_sampling, ppo, cispo or dro")]
    UnknownLoss(String),
    #[error("the loss '{loss}' has no option '{option}'; remove it")]
    UnknownOption { loss: String, option: String },
    #[error("the loss '{loss}' needs the option '{option}'")]
    MissingOption { loss: String, option: &'static str },
    #[error("the options of '{loss}' must be {rule}")]
    Invalid {
        loss: String,
        /// Condition that the options must meet.
        rule: &'static str,
    },
}

/// Bounds of the ratio itself: 0.8 and 1.2, where other libraries write 0.2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    pub low: f64,
    pub high: f64,
}

impl Default for Clip {
    /// Returns the default bounds of Tinker.
    fn default() -> Self {
        Self { low: 0.8, high: 1.2 }
    }
}

impl Clip {
    fn of(self, ratio: f64) -> f64 {
        // Unlike `clamp`, this does not panic if a bound is not a number.
        ratio.max(self.low).min(self.high)
    }
}

/// A loss over sampled answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PolicyLoss {
    /// REINFORCE with an importance ratio, because another policy sampled.
    ImportanceSampling,
    /// PPO: moving the ratio beyond the bounds gains nothing.
    Ppo(Clip),
    /// CISPO: the importance ratio is bounded.
    Cispo(Clip),
    /// DRO: the distance from the sampling policy is penalised.
    Dro {
        /// Factor of the penalty.
        beta: f64,
    },
}

/// A loss, selected by its name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    /// Cross-entropy of given answers.
    CrossEntropy,
    /// Policy gradient loss of sampled answers.
    Policy(PolicyLoss),
}

impl Loss {
    /// Returns the loss that `loss_fn` and `loss_fn_config` of Tinker's `forward_backward` select.
    ///
    /// # Errors
    /// Fails if there is no such loss, or it does not have these options.
    pub fn named(name: &str, config: &BTreeMap<String, f64>) -> Result<Self, LossError> {
        let mut options = LossOptions { loss: name, config: config.clone() };
        let loss = match name {
            "cross_entropy" => Self::CrossEntropy,
            "importance_sampling" => Self::Policy(PolicyLoss::ImportanceSampling),
            "ppo" => Self::Policy(PolicyLoss::Ppo(options.clip()?)),
            "cispo" => Self::Policy(PolicyLoss::Cispo(options.clip()?)),
            "dro" => Self::Policy(PolicyLoss::Dro { beta: options.beta()? }),
            _ => return Err(LossError::UnknownLoss(name.to_owned())),
        };
        options.finish()?;
        Ok(loss)
    }
}

/// Options that have not been read yet.
struct LossOptions<'a> {
    loss: &'a str,
    config: BTreeMap<String, f64>,
}

impl LossOptions<'_> {
    fn clip(&mut self) -> Result<Clip, LossError> {
        let defaults = Clip::default();
        let low = self.config.remove("clip_low_threshold").unwrap_or(defaults.low);
        let high = self.config.remove("clip_high_threshold").unwrap_or(defaults.high);
        if low >= 0.0 && high.is_finite() && low <= high {
            return Ok(Clip { low, high });
        }
        Err(self.invalid(
            "0 <= clip_low_threshold <= clip_high_threshold; the thresholds are bounds of \
                          the ratio, as 0.8 and 1.2",
        ))
    }

    /// Beta is required: no default is documented, and a guessed one would change the result.
    fn beta(&mut self) -> Result<f64, LossError> {
        let missing = || LossError::MissingOption { loss: self.loss.to_owned(), option: "beta" };
        let beta = self.config.remove("beta").ok_or_else(missing)?;
        if beta >= 0.0 && beta.is_finite() { Ok(beta) } else { Err(self.invalid("a finite beta >= 0")) }
    }

    fn finish(mut self) -> Result<(), LossError> {
        match self.config.pop_first() {
            Some((option, _)) => Err(LossError::UnknownOption { loss: self.loss.to_owned(), option }),
            None => Ok(()),
        }
    }

    fn invalid(&self, rule: &'static str) -> LossError {
        LossError::Invalid { loss: self.loss.to_owned(), rule }
    }
}

/// Loss and gradients of one token row.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluated {
    pub loss: f64,
    /// Derivative of the loss by the log-probability of each token.
    pub gradients: Vec<f32>,
    /// The loss and other values, to be summed over rows.
    pub metrics: LossMetrics,
}

/// Returns the `cross_entropy` of one row.
///
/// # Panics
/// Panics if the lengths differ.
#[must_use]
pub fn cross_entropy(logprobs: &[f32], weights: &[f32]) -> Evaluated {
    assert_eq!(logprobs.len(), weights.len(), "a weight for each token");
    let loss = -weighted(logprobs, weights);
    let weight: f64 = weights.iter().copied().map(f64::from).sum();
    Evaluated {
        loss,
        gradients: weights.iter().map(|weight| -weight).collect(),
        metrics: LossMetrics::from([("loss:sum", loss), ("weight:sum", weight)]),
    }
}

/// Returns the weighted sum of `values`. A value with weight 0 counts nothing, even if it is not finite.
fn weighted(values: &[f32], weights: &[f32]) -> f64 {
    let counted = values.iter().zip(weights).filter(|(_, weight)| **weight != 0.0);
    counted.map(|(value, weight)| f64::from(*value) * f64::from(*weight)).sum()
}

impl PolicyLoss {
    /// Returns this loss of one row, from the log-probabilities now, those at sampling, and the advantages.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "gradients are numbers of 32 bits")]
    pub fn of(self, logprobs: &[f32], sampling_logprobs: &[f32], advantages: &[f32]) -> Evaluated {
        assert_eq!(logprobs.len(), sampling_logprobs.len(), "where each token came from");
        assert_eq!(logprobs.len(), advantages.len(), "an advantage for each token");
        let names = ["loss:sum", "sampled:sum", "clipped:sum", "sampling_minus_learned:sum"];
        let mut sums = [0.0; 4];
        let mut gradients = Vec::with_capacity(logprobs.len());
        for ((&logprob, &sampling), &advantage) in logprobs.iter().zip(sampling_logprobs).zip(advantages) {
            let token = self.of_token(f64::from(logprob), f64::from(sampling), f64::from(advantage));
            gradients.push(token.gradient as f32);
            sums[0] += token.loss;
            // Prompt tokens have no advantage.
            if advantage != 0.0 {
                sums[1] += 1.0;
                sums[2] += f64::from(u8::from(token.is_clipped));
                sums[3] += f64::from(sampling) - f64::from(logprob);
            }
        }
        Evaluated { loss: sums[0], gradients, metrics: names.into_iter().zip(sums).collect() }
    }

    fn of_token(self, logprob: f64, sampling: f64, advantage: f64) -> Token {
        let distance = logprob - sampling;
        let ratio = distance.exp();
        let reward = ratio * advantage;
        match self {
            Self::Dro { beta } => {
                let loss = 0.5 * beta * distance * distance - advantage * logprob;
                Token { loss, gradient: beta * distance - advantage, is_clipped: false }
            }
            // An infinite ratio times 0 would not be a number.
            _ if advantage == 0.0 => Token { loss: 0.0, gradient: 0.0, is_clipped: false },
            Self::ImportanceSampling => Token { loss: -reward, gradient: -reward, is_clipped: false },
            Self::Ppo(clip) => {
                let clipped = clip.of(ratio) * advantage;
                let is_clipped = clipped < reward;
                let gradient = if is_clipped { 0.0 } else { -reward };
                Token { loss: -reward.min(clipped), gradient, is_clipped }
            }
            Self::Cispo(clip) => {
                let bounded = clip.of(ratio);
                let gradient = -bounded * advantage;
                Token { loss: gradient * logprob, gradient, is_clipped: bounded != ratio }
            }
        }
    }
}

/// Loss and gradient of one token.
struct Token {
    loss: f64,
    gradient: f64,
    is_clipped: bool,
}

/// An answer with one value per token.
#[derive(Debug, Clone, Copy)]
pub struct AnswerLogprobs<'a> {
    /// Log-probabilities under the policy in training.
    pub logprobs: &'a [f32],
    /// Log-probabilities under the reference.
    pub reference_logprobs: &'a [f32],
    /// Weights: 1 for answer tokens, 0 for prompt tokens.
    pub weights: &'a [f32],
}

impl AnswerLogprobs<'_> {
    /// Returns the log of the ratio between the answer's probabilities under policy and reference.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    #[must_use]
    pub fn gain(&self) -> f64 {
        assert_eq!(self.logprobs.len(), self.weights.len(), "a weight for each token");
        assert_eq!(self.reference_logprobs.len(), self.weights.len(), "a reference for each token");
        weighted(self.logprobs, self.weights) - weighted(self.reference_logprobs, self.weights)
    }

    #[expect(clippy::cast_possible_truncation, reason = "gradients are numbers of 32 bits")]
    fn gradients(&self, by_gain: f64) -> Vec<f32> {
        self.weights.iter().map(|weight| (by_gain * f64::from(*weight)) as f32).collect()
    }
}

/// DPO loss and gradients of one pair.
#[derive(Debug, Clone, PartialEq)]
pub struct DpoResult {
    pub loss: f64,
    /// Derivative of the loss by the log-probability of each token of the chosen answer.
    pub chosen_gradients: Vec<f32>,
    /// Derivative of the loss by the log-probability of each token of the rejected answer.
    pub rejected_gradients: Vec<f32>,
    /// The loss and other values, to be summed over pairs.
    pub metrics: LossMetrics,
}

/// Returns the DPO loss of one pair. Larger `beta` keeps the policy nearer to the reference.
///
/// # Panics
/// Panics if an answer's lengths differ.
#[must_use]
pub fn dpo(beta: f64, chosen: AnswerLogprobs<'_>, rejected: AnswerLogprobs<'_>) -> DpoResult {
    let rewards = [chosen, rejected].map(|answer| beta * answer.gain());
    let margin = rewards[0] - rewards[1];
    // -log σ(x) = log(1 + e^-x) and its derivative -σ(-x), computed without overflow on either side.
    let loss = (-margin).max(0.0) + (-margin.abs()).exp().ln_1p();
    let by_margin = -1.0 / (1.0 + margin.exp());
    let metrics = [
        ("loss:sum", loss),
        ("accuracy:sum", f64::from(u8::from(margin > 0.0))),
        ("chosen_reward:sum", rewards[0]),
        ("margin:sum", margin),
        ("rejected_reward:sum", rewards[1]),
    ];
    DpoResult {
        loss,
        chosen_gradients: chosen.gradients(beta * by_margin),
        rejected_gradients: rejected.gradients(-beta * by_margin),
        metrics: metrics.into(),
    }
}

/// Loss of KTO. Larger `beta` keeps the policy nearer to the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KtoLoss {
    pub beta: f64,
    /// Weight of desirable answers.
    pub desirable_weight: f64,
    /// Weight of undesirable answers.
    pub undesirable_weight: f64,
}

impl KtoLoss {
    /// Returns the loss of one answer, where `kl` is the result of [`kto_kl`].
    ///
    /// # Panics
    /// Panics if the answer's lengths differ.
    #[must_use]
    pub fn of(self, answer: AnswerLogprobs<'_>, is_desirable: bool, kl: f64) -> Evaluated {
        let gain = answer.gain();
        let (loss, by_gain) = self.by_gain(gain, is_desirable, kl);
        let metrics = [("loss:sum", loss), ("reward:sum", self.beta * gain)];
        Evaluated { loss, gradients: answer.gradients(by_gain), metrics: metrics.into() }
    }

    /// Returns the loss of an answer whose log-probability exceeds that of the reference by `gain`.
    #[must_use]
    pub fn value(self, gain: f64, is_desirable: bool, kl: f64) -> f64 {
        self.by_gain(gain, is_desirable, kl).0
    }

    /// Returns the loss and its derivative by the gain.
    fn by_gain(self, gain: f64, is_desirable: bool, kl: f64) -> (f64, f64) {
        let (sign, weight) =
            if is_desirable { (1.0, self.desirable_weight) } else { (-1.0, self.undesirable_weight) };
        // σ(-x), whose derivative is -σ(x) σ(-x); both factors are finite for every x.
        let x = sign * self.beta * (gain - kl);
        let (other, loss) = (1.0 / (1.0 + (-x).exp()), 1.0 / (1.0 + x.exp()));
        (weight * loss, -sign * self.beta * weight * other * loss)
    }
}

/// Returns KTO's estimate of the divergence of the policy from the reference: the mean of the `gains` of
/// mismatched answers, and at least 0.
#[must_use]
pub fn kto_kl(gains: &[f64]) -> f64 {
    let mean = gains.iter().fold(0.0, |sum, gain| sum + gain) / gains.len() as f64;
    // Unlike `max`, this keeps what is not a number.
    if mean < 0.0 { 0.0 } else { mean }
}
