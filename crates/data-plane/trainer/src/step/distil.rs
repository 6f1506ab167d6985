//! Distillation (Hinton et al. 2015): each token is to be as likely as it was for another model. Where the
//! other model's probabilities are not recorded, the recorded token itself is to be likely.

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

/// Score of one recorded answer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DistillScore {
    /// Sum of the tokens' losses.
    pub loss: f64,
    /// Number of correctly predicted tokens.
    pub right: u64,
    /// Number of all tokens.
    pub tokens: u64,
}

impl<B: BorrowedBase> TrainState<B> {
    /// Makes a step on the recorded answers `said`. The returned loss is that of the recorded tokens.
    ///
    /// # Errors
    /// Fails if the executor is gone, or loss or gradient is not a number. The adapter is unchanged then.
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

    /// Scores each answer, where predictions may be only the tokens `allowed`; an empty list allows all.
    ///
    /// # Errors
    /// Fails if the executor is gone.
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

/// Returns the number of answer tokens.
fn answered(said: &DistillationSample) -> usize {
    said.example.weights.iter().filter(|weight| **weight > 0.0).count()
}

/// One microbatch of a mean over `total` tokens: `-Σ p log q` over the tokens with recorded probabilities.
struct DistillLoss {
    /// Gradients of the recorded tokens.
    own: Vec<f32>,
    /// Gradients of the alternatives at each position.
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
