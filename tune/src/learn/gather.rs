//! Gradients gathered over several batches, whose loss is a sum over tokens, and the one step that is made of them.

use std::{error::Error, ops::Range};

use model::{
    backward::{self, Keep, Learner},
    cpu::Compute,
    forward::ReverseLayers,
};

use super::{BATCH_ROWS, KEPT_ROWS, LearnError, Learning};
use crate::{
    loss::{self, Evaluated, Loss, Metrics},
    optimizer::Hyperparameters,
};

/// A sequence, and what a loss needs of each of its tokens: one number of each kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Datum {
    /// At least one.
    pub tokens: Vec<u32>,
    /// What comes behind each of them.
    pub targets: Vec<u32>,
    /// What each target is worth: its weight, or its advantage.
    pub weights: Vec<f32>,
    /// How likely it was when it was sampled; of losses of given answers nothing.
    pub sampling_logprobs: Vec<f32>,
}

/// Whether anything is learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Nothing is.
    Forward,
    /// Gradients are added to those that are there.
    Backward,
}

/// What a batch came to.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Gathered {
    /// Of all targets, datum after datum.
    pub logprobs: Vec<f32>,
    /// Summed over the data, in their order.
    pub metrics: Metrics,
}

impl<B: ReverseLayers<Compute, Error: Error + 'static>> Learning<B> {
    /// Evaluates `loss` of `data`; going backward, its gradients are added to those that are there. However data are cut into
    /// calls, the gradients are the same.
    ///
    /// # Errors
    /// The executor is gone, or the loss is no number; the gradients are as they were.
    pub fn gather(
        &mut self,
        data: &[Datum],
        loss: Loss,
        direction: Direction,
    ) -> Result<Gathered, LearnError<B::Error>> {
        let kept = (direction == Direction::Backward).then(|| self.gradients.clone());
        let gathered = self.gather_parts(data, loss, direction);
        if let (Err(_), Some(kept)) = (&gathered, kept) {
            self.gradients = kept;
        }
        gathered
    }

    fn gather_parts(
        &mut self,
        data: &[Datum],
        loss: Loss,
        direction: Direction,
    ) -> Result<Gathered, LearnError<B::Error>> {
        let learner = self.learner()?;
        let mut gathered = Gathered::default();
        for part in parts(data) {
            let logprobs = self.gather_part(&learner, part, loss, direction)?;
            let mut rest = &logprobs[..];
            for datum in part {
                let (own, behind) = rest.split_at(datum.targets.len());
                rest = behind;
                loss::add(
                    &mut gathered.metrics,
                    &of(loss, own, &datum.weights, &datum.sampling_logprobs).metrics,
                );
            }
            gathered.logprobs.extend(logprobs);
        }
        if gathered.metrics.values().all(|value| value.is_finite()) {
            return Ok(gathered);
        }
        Err(LearnError::NotANumber { what: "loss", step: self.state.step + 1 })
    }

    fn gather_part(
        &mut self,
        learner: &Learner,
        part: &[Datum],
        loss: Loss,
        direction: Direction,
    ) -> Result<Vec<f32>, LearnError<B::Error>> {
        let targets: Vec<Vec<Option<u32>>> =
            part.iter().map(|datum| datum.targets.iter().copied().map(Some).collect()).collect();
        let examples: Vec<_> = part
            .iter()
            .zip(&targets)
            .map(|(datum, targets)| backward::Example { tokens: &datum.tokens, targets, dropout: None })
            .collect();
        let is_kept = direction == Direction::Backward && rows(part) <= KEPT_ROWS;
        self.trainer.set_keep(if is_kept { Keep::All } else { Keep::Inputs });
        let tape = self.trainer.forward(learner, &examples)?;
        if direction == Direction::Forward {
            return Ok(self.trainer.log_probabilities(learner, &tape)?);
        }
        let all = |of: fn(&Datum) -> &Vec<f32>| part.iter().flat_map(of).copied().collect();
        let mut summed = Summed {
            loss,
            weights: all(|datum| &datum.weights),
            sampling_logprobs: all(|datum| &datum.sampling_logprobs),
            logprobs: Vec::new(),
        };
        self.trainer.reverse(learner, tape, &mut summed, &mut self.gradients)?;
        Ok(summed.logprobs)
    }

    /// Makes a step of all gradients that were gathered, which are gone then; gives their length, before it was shortened to
    /// `max_norm`, if that is said.
    ///
    /// # Errors
    /// The gradient is no number, or what the step would give; the adapter is as it was.
    pub fn step_gathered(
        &mut self,
        hyper: &Hyperparameters,
        max_norm: Option<f64>,
    ) -> Result<f64, LearnError<B::Error>> {
        let kept = (self.method.clone(), self.state.clone());
        let stepped = self.step(0.0, 0, hyper, max_norm.unwrap_or(f64::INFINITY));
        self.gradients.clear();
        let stepped = stepped?;
        if self.method.tensors().into_iter().flatten().all(|number| number.is_finite()) {
            return Ok(stepped.grad_norm);
        }
        (self.method, self.state) = kept;
        Err(LearnError::NotANumber { what: "result", step: self.state.step + 1 })
    }
}

fn rows(data: &[Datum]) -> usize {
    data.iter().map(|datum| datum.tokens.len()).sum()
}

/// As many data together as go through the model at once.
fn parts(data: &[Datum]) -> impl Iterator<Item = &[Datum]> {
    let mut rest = data;
    std::iter::from_fn(move || {
        let mut rows = 0;
        let fits = |datum: &&Datum| {
            rows += datum.tokens.len();
            rows <= BATCH_ROWS
        };
        let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (part, behind) = rest.split_at(count);
        rest = behind;
        (!part.is_empty()).then_some(part)
    })
}

fn of(loss: Loss, logprobs: &[f32], weights: &[f32], sampling_logprobs: &[f32]) -> Evaluated {
    match loss {
        Loss::CrossEntropy => loss::cross_entropy(logprobs, weights),
        Loss::Policy(loss) => loss.of(logprobs, sampling_logprobs, weights),
    }
}

/// A sum over tokens, of each of which the gradient is its own.
struct Summed {
    loss: Loss,
    weights: Vec<f32>,
    sampling_logprobs: Vec<f32>,
    logprobs: Vec<f32>,
}

impl backward::Loss for Summed {
    fn gradients(&mut self, targets: Range<usize>, log_probabilities: &[f32], gradients: &mut [f32]) {
        let sampling_logprobs = match self.loss {
            Loss::CrossEntropy => &[][..],
            Loss::Policy(_) => &self.sampling_logprobs[targets.clone()],
        };
        let evaluated = of(self.loss, log_probabilities, &self.weights[targets], sampling_logprobs);
        self.logprobs.extend_from_slice(log_probabilities);
        gradients.copy_from_slice(&evaluated.gradients);
    }
}
