//! Gradients gathered over several batches, whose loss is a sum over tokens, and the one step that is made of them.

use std::ops::Range;

use model::backward::{self, ReductionTurn, SavedScope, TrainError, TrainableAdapter, Trainer};

use super::{
    KEPT_ROWS, TrainState, TrainStepError,
    microbatch::parts,
    microbatch_pool::{BorrowedBase, RowCount},
};
use crate::{
    loss::{self, Evaluated, Loss, LossMetrics},
    optimizer::Hyperparameters,
};

/// A sequence, and what a loss needs of each of its tokens: one number of each kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SequenceSample {
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
pub struct BatchOutput {
    /// Of all targets, datum after datum.
    pub logprobs: Vec<f32>,
    /// Summed over the data, in their order.
    pub metrics: LossMetrics,
}

impl<B: BorrowedBase> TrainState<B> {
    /// Evaluates `loss` of `data`; going backward, its gradients are added to those that are there. However data are cut into
    /// calls, the gradients are the same.
    ///
    /// # Errors
    /// The executor is gone, or the loss or a gradient is no number; the gradients are as they were.
    pub fn gather(
        &mut self,
        data: &[SequenceSample],
        loss: Loss,
        direction: Direction,
    ) -> Result<BatchOutput, TrainStepError<B::Error>> {
        let kept = (direction == Direction::Backward).then(|| self.gradients.clone());
        let gathered = self.gather_parts(data, loss, direction).and_then(|gathered| {
            // A gradient that is no number would stay so whatever is added to it.
            if self.gradients.tensors().into_iter().flatten().all(|number| number.is_finite()) {
                return Ok(gathered);
            }
            Err(TrainStepError::NotANumber { what: "gradient", step: self.state.step + 1 })
        });
        if let (Err(_), Some(kept)) = (&gathered, kept) {
            self.gradients = kept;
        }
        gathered
    }

    /// Sums that were gathered for the next step, tensor by tensor.
    #[must_use]
    pub fn gathered(&self) -> Vec<&[f32]> {
        self.gradients.tensors()
    }

    /// Goes on from sums that [`gathered`](Self::gathered) gave, in the place of those that are there.
    pub fn set_gathered(&mut self, sums: &[Vec<f32>]) {
        for (own, given) in self.gradients.tensors_mut().into_iter().zip(sums) {
            own.copy_from_slice(given);
        }
    }

    fn gather_parts(
        &mut self,
        data: &[SequenceSample],
        loss: Loss,
        direction: Direction,
    ) -> Result<BatchOutput, TrainStepError<B::Error>> {
        let learner = self.learner()?;
        let mut turns = (direction == Direction::Backward).then(|| self.gradients.turns());
        let turns = std::iter::from_fn(|| Some(turns.as_mut().and_then(Iterator::next)));
        let cut: Vec<_> = parts(data, |datum: &SequenceSample| datum.tokens.len()).collect();
        let of_parts = self.lanes.each(cut.iter().copied().zip(turns), |trainer, (part, turn)| {
            gather_part(trainer, &learner, part, loss, turn)
        })?;
        let mut gathered = BatchOutput::default();
        for (part, logprobs) in cut.into_iter().zip(of_parts) {
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
        Err(TrainStepError::NotANumber { what: "loss", step: self.state.step + 1 })
    }

    /// Makes a step of all gradients that were gathered, and forgets them; gives their length, before it was shortened to
    /// `max_norm`, if that is said.
    ///
    /// # Errors
    /// What the step would give is no number; adapter, optimizer and gradients are as they were.
    pub fn step_gathered(
        &mut self,
        hyper: &Hyperparameters,
        max_norm: Option<f64>,
    ) -> Result<f64, TrainStepError<B::Error>> {
        let kept = (self.method.clone(), self.state.clone(), self.gradients.clone());
        let stepped = self.step(0.0, 0, hyper, max_norm.unwrap_or(f64::INFINITY));
        let is_number = self.method.tensors().into_iter().flatten().all(|number| number.is_finite());
        if is_number && let Ok(stepped) = stepped {
            self.gradients.clear();
            return Ok(stepped.grad_norm);
        }
        (self.method, self.state, self.gradients) = kept;
        Err(stepped.err().unwrap_or(TrainStepError::NotANumber { what: "result", step: self.state.step + 1 }))
    }
}

/// The log-probabilities of a part's targets; its gradients are added where it has a `turn`.
fn gather_part<B: BorrowedBase>(
    trainer: &mut Trainer<B>,
    learner: &TrainableAdapter,
    part: &[SequenceSample],
    loss: Loss,
    turn: Option<ReductionTurn<'_>>,
) -> Result<Vec<f32>, TrainError<B::Error>> {
    let targets: Vec<Vec<Option<u32>>> =
        part.iter().map(|datum| datum.targets.iter().copied().map(Some).collect()).collect();
    let examples: Vec<_> = part
        .iter()
        .zip(&targets)
        .map(|(datum, targets)| backward::Example { tokens: &datum.tokens, targets, dropout: None })
        .collect();
    let is_kept = turn.is_some() && part.rows() <= KEPT_ROWS;
    trainer.set_keep(if is_kept { SavedScope::All } else { SavedScope::Inputs });
    let tape = trainer.forward(learner, &examples)?;
    let Some(turn) = turn else { return trainer.log_probabilities(learner, &tape) };
    let all = |of: fn(&SequenceSample) -> &Vec<f32>| part.iter().flat_map(of).copied().collect();
    let mut summed = SummedLoss {
        loss,
        weights: all(|datum| &datum.weights),
        sampling_logprobs: all(|datum| &datum.sampling_logprobs),
        logprobs: Vec::new(),
    };
    trainer.reverse(learner, tape, &mut summed, turn)?;
    Ok(summed.logprobs)
}

impl RowCount for &[SequenceSample] {
    fn rows(&self) -> usize {
        self.iter().map(|datum| datum.tokens.len()).sum()
    }
}

fn of(loss: Loss, logprobs: &[f32], weights: &[f32], sampling_logprobs: &[f32]) -> Evaluated {
    match loss {
        Loss::CrossEntropy => loss::cross_entropy(logprobs, weights),
        Loss::Policy(loss) => loss.of(logprobs, sampling_logprobs, weights),
    }
}

/// A sum over tokens, of each of which the gradient is its own.
struct SummedLoss {
    loss: Loss,
    weights: Vec<f32>,
    sampling_logprobs: Vec<f32>,
    logprobs: Vec<f32>,
}

impl backward::Loss for SummedLoss {
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
