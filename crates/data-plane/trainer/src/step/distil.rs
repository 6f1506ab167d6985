//! Learning to say what another model says: every token is to be as likely as it was there (distillation; Hinton et al. 2015),
//! as far as that was noted, and else the token that was said is to be likely.

use std::ops::Range;

use model::backward::{self, SavedScope};

use super::{
    StepResult, TokenLoss, TrainState, TrainStepError,
    microbatch::{Inputs, parts},
    microbatch_pool::BorrowedBase,
};
use crate::{
    data::{DistillationSample, Example},
    optimizer::Hyperparameters,
};

/// How an answer is met by who learned to say it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DistillScore {
    /// The sum of the tokens' losses.
    pub loss: f64,
    /// How many tokens would have been guessed.
    pub right: u64,
    /// Of how many.
    pub tokens: u64,
}

impl<B: BorrowedBase> TrainState<B> {
    /// Learns what was `said`. The loss that is given is that of the tokens that were said.
    ///
    /// # Errors
    /// The executor is gone, or the gradient is no number; the adapter is as it was.
    pub fn distil(
        &mut self,
        said: &[&DistillationSample],
        hyper: &Hyperparameters,
        max_norm: f64,
    ) -> Result<StepResult, TrainStepError<B::Error>> {
        let total: usize = said.iter().map(|said| answered(said)).sum();
        let mut numbers = 0..;
        let inputs: Vec<_> = parts(said, rows)
            .map(|part| {
                let dropouts = part.iter().zip(&mut numbers).filter_map(|(_, number)| self.dropped(number));
                (Inputs::of(&examples(part)).dropping(dropouts), DistillLoss::of(part, total))
            })
            .collect();
        self.teach(inputs, total as f64, hyper, max_norm)
    }

    /// How each of the answers is met by who may say only the tokens `allowed`; all, if none are given.
    ///
    /// # Errors
    /// The executor is gone.
    pub fn meet(
        &mut self,
        said: &[&DistillationSample],
        allowed: &[u32],
    ) -> Result<Vec<DistillScore>, TrainStepError<B::Error>> {
        let learner = self.learner()?;
        let of_parts = self.lanes.each(
            parts(said, rows).map(|part| Inputs::of(&examples(part))),
            |trainer, inputs| {
                trainer.set_keep(SavedScope::Inputs);
                let tape = trainer.forward(&learner, &inputs.examples())?;
                trainer.predictions(&learner, &tape, allowed)
            },
        )?;
        let mut predictions = of_parts.into_iter().flatten();
        let mut met = |said: &&DistillationSample| {
            let tokens = &said.example.tokens[said.example.tokens.len() - answered(said)..];
            tokens.iter().zip(&mut predictions).fold(DistillScore::default(), |met, (&token, prediction)| {
                DistillScore {
                    loss: met.loss - f64::from(prediction.log_probability),
                    right: met.right + u64::from(prediction.likeliest == token),
                    tokens: met.tokens + 1,
                }
            })
        };
        Ok(said.iter().map(&mut met).collect())
    }
}

fn rows(said: &&DistillationSample) -> usize {
    said.example.tokens.len() - 1
}

fn examples<'a>(said: &[&'a DistillationSample]) -> Vec<&'a Example> {
    said.iter().map(|said| &said.example).collect()
}

/// Tokens of the answer.
fn answered(said: &DistillationSample) -> usize {
    said.example.weights.iter().filter(|weight| **weight > 0.0).count()
}

/// The mean over `total` tokens, of which these are a part: `-Σ p log q` over the tokens that are known to be likely.
struct DistillLoss {
    /// Of the tokens that were said.
    own: Vec<f32>,
    /// Of those that might have been.
    others: Vec<Vec<(u32, f32)>>,
    sum: f64,
}

impl DistillLoss {
    fn of(part: &[&DistillationSample], total: usize) -> Self {
        let mut loss = Self { own: Vec::new(), others: Vec::new(), sum: 0.0 };
        for said in part {
            let tokens = &said.example.tokens[said.example.tokens.len() - answered(said)..];
            for (at, &token) in tokens.iter().enumerate() {
                loss.add(token, said.likely.get(at).map_or(&[], Vec::as_slice), total);
            }
        }
        loss
    }

    #[expect(clippy::cast_possible_truncation, reason = "gradients are numbers of 32 bits")]
    fn add(&mut self, token: u32, likely: &[(u32, f32)], total: usize) {
        let gradient = |probability: f32| (-f64::from(probability) / total as f64) as f32;
        let own = likely.iter().find(|(other, _)| *other == token).map(|(_, probability)| *probability);
        self.own.push(gradient(own.unwrap_or(if likely.is_empty() { 1.0 } else { 0.0 })));
        let others = likely.iter().filter(|(other, _)| *other != token);
        self.others.push(others.map(|&(other, probability)| (other, gradient(probability))).collect());
    }
}

impl backward::Loss for DistillLoss {
    fn gradients(&mut self, targets: Range<usize>, log_probabilities: &[f32], gradients: &mut [f32]) {
        self.sum -= log_probabilities.iter().copied().map(f64::from).sum::<f64>();
        gradients.copy_from_slice(&self.own[targets]);
    }

    fn others(&self, target: usize) -> &[(u32, f32)] {
        &self.others[target]
    }
}

impl TokenLoss for DistillLoss {
    fn sum(&self) -> f64 {
        self.sum
    }
}
