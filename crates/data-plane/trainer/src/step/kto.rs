//! KTO (Ethayarajh et al. 2024): a step from answers that are rated one by one.
//!
//! A step compares each answer's gain of log-probability over the reference with the mean gain of mismatched
//! answers: each prompt of the batch with the answer before it, and the first with the last, as in TRL. The
//! only answer of a batch is compared with itself.

use super::{
    FixedGradients, StepResult, TrainState, TrainStepError, answers, forward, log_probabilities,
    microbatch::{Inputs, parts, rows},
    microbatch_pool::BorrowedBase,
    summed,
};
use crate::{
    data::{Example, RatedAnswer},
    loss::{self, AnswerLogprobs, KtoLoss},
    optimizer::Hyperparameters,
};

/// Loss of KTO, and the limit of its mismatched answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KtoOptions {
    pub loss: KtoLoss,
    /// Maximum tokens of a prompt with another's answer; the rest is cut off.
    pub max_tokens: usize,
}

impl<B: BorrowedBase> TrainState<B> {
    /// Makes a KTO step on `rated`.
    ///
    /// # Errors
    /// Fails as [`learn`](Self::learn) does.
    pub fn rate(
        &mut self,
        rated: &[&RatedAnswer],
        kto: KtoOptions,
        hyper: &Hyperparameters,
        max_norm: f64,
    ) -> Result<StepResult, TrainStepError<B::Error>> {
        let mismatched = mismatched(rated, kto.max_tokens);
        let kl = loss::kto_kl(&self.gains(&mismatched)?);
        let others: usize = mismatched.iter().map(|example| 2 * rows(&example)).sum();
        let learner = self.learner()?;
        let (start, scale) = (&self.start, 1.0 / rated.len() as f64);
        self.gradients.clear();
        let parts = parts(rated, |rated| rows(&&rated.example)).map(inputs);
        let learned =
            self.lanes.each(parts.zip(self.gradients.turns()), |trainer, ((inputs, ratings), turn)| {
                let reference = log_probabilities(trainer, start, &inputs)?;
                let tape = forward(trainer, &learner, &inputs)?;
                let rows = 2 * tape.rows();
                let values = trainer.log_probabilities(&learner, &tape)?;
                let mut gradients = Vec::with_capacity(values.len());
                let mut sum = 0.0;
                for (answer, is_desirable) in answers(&inputs, &values, &reference).into_iter().zip(ratings) {
                    let evaluated = kto.loss.of(answer, is_desirable, kl);
                    sum += evaluated.loss;
                    gradients.extend(evaluated.gradients);
                }
                trainer.reverse(&learner, tape, &mut FixedGradients { gradients, scale }, turn)?;
                Ok((sum, rows))
            })?;
        let (sum, rows) = summed(learned);
        self.step(sum * scale, rows + others, hyper, max_norm)
    }

    /// Returns the mean KTO loss of held-out answers, `batch` at a time; `None` without answers.
    ///
    /// # Errors
    /// Fails if the executor is gone.
    pub fn evaluate_rated(
        &mut self,
        rated: &[&RatedAnswer],
        kto: KtoOptions,
        batch: usize,
    ) -> Result<Option<f64>, TrainStepError<B::Error>> {
        let mut sum = 0.0;
        for batch in rated.chunks(batch) {
            let kl = loss::kto_kl(&self.gains(&mismatched(batch, kto.max_tokens))?);
            let examples: Vec<Example> = batch.iter().map(|rated| rated.example.clone()).collect();
            let gains = self.gains(&examples)?;
            let losses =
                gains.iter().zip(batch).map(|(gain, rated)| kto.loss.value(*gain, rated.is_desirable, kl));
            sum = losses.fold(sum, |sum, loss| sum + loss);
        }
        Ok((!rated.is_empty()).then(|| sum / rated.len() as f64))
    }

    /// Returns how much the log-probability of each example's answer exceeds that of the reference.
    fn gains(&mut self, examples: &[Example]) -> Result<Vec<f64>, TrainStepError<B::Error>> {
        let learner = self.learner()?;
        let (start, examples) = (&self.start, examples.iter().collect::<Vec<_>>());
        let gains = self.lanes.each(parts(&examples, rows).map(Inputs::of), |trainer, inputs| {
            let reference = log_probabilities(trainer, start, &inputs)?;
            let values = log_probabilities(trainer, &learner, &inputs)?;
            Ok(answers(&inputs, &values, &reference).iter().map(AnswerLogprobs::gain).collect::<Vec<_>>())
        })?;
        Ok(gains.concat())
    }
}

/// Returns each prompt with the answer before it; the first prompt has the last answer.
fn mismatched(rated: &[&RatedAnswer], max_tokens: usize) -> Vec<Example> {
    let before = rated.iter().cycle().skip(rated.len().saturating_sub(1));
    rated.iter().zip(before).map(|(rated, other)| rated.with_answer_of(other, max_tokens)).collect()
}

fn inputs(part: &[&RatedAnswer]) -> (Inputs, Vec<bool>) {
    let examples: Vec<&Example> = part.iter().map(|rated| &rated.example).collect();
    (Inputs::of(&examples), part.iter().map(|rated| rated.is_desirable).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(prompt: u32, answer: u32) -> RatedAnswer {
        let example = Example { line: 1, tokens: vec![prompt, prompt, answer], weights: vec![0.0, 1.0] };
        RatedAnswer { example, is_desirable: true }
    }

    #[test]
    fn each_prompt_gets_the_answer_before_it_and_a_single_one_its_own() {
        let rated = [answer(1, 11), answer(2, 12), answer(3, 13)];
        let tokens = |rated: &[&RatedAnswer]| -> Vec<[u32; 2]> {
            mismatched(rated, 64).iter().map(|example| [example.tokens[0], example.tokens[2]]).collect()
        };
        assert_eq!(tokens(&rated.each_ref()), [[1, 13], [2, 11], [3, 12]]);
        assert_eq!(tokens(&[&rated[1]]), [[2, 12]]);
        assert!(tokens(&[]).is_empty());
    }
}
