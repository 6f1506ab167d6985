//! Gradients accumulated over several batches, whose loss is a sum over tokens, and the step with them.

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

/// A sequence with the per-token inputs of a loss, one value of each kind per token.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SequenceSample {
    /// At least one token.
    pub tokens: Vec<u32>,
    /// Target after each token.
    pub targets: Vec<u32>,
    /// Weight or advantage of each target.
    pub weights: Vec<f32>,
    /// Log-probability of each target at sampling; empty for cross-entropy.
    pub sampling_logprobs: Vec<f32>,
}

/// Whether gradients are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Forward,
    /// Gradients are added to the accumulated ones.
    Backward,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct BatchOutput {
    /// Log-probabilities of all targets, sequence by sequence.
    pub logprobs: Vec<f32>,
    /// Sums over the sequences, in their order.
    pub metrics: LossMetrics,
}

impl<B: BorrowedBase> TrainState<B> {
    /// Evaluates `loss` of `data`; in direction `Backward` it adds to the accumulated gradients. The
    /// gradients do not depend on how data are cut into calls.
    ///
    /// # Errors
    /// Fails if the executor is gone or a loss or gradient is not a number; the gradients are unchanged then.
    pub fn gather(
        &mut self,
        data: &[SequenceSample],
        loss: Loss,
        direction: Direction,
    ) -> Result<BatchOutput, TrainStepError<B::Error>> {
        let kept = (direction == Direction::Backward).then(|| self.gradients.clone());
        let gathered = self.gather_parts(data, loss, direction).and_then(|gathered| {
            // A gradient that is not a number stays so, and any sum with it too.
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

    /// Returns the gradients accumulated for the next step, tensor by tensor.
    #[must_use]
    pub fn gathered(&self) -> Vec<&[f32]> {
        self.gradients.tensors()
    }

    /// Replaces the accumulated gradients by sums that [`gathered`](Self::gathered) returned.
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

    /// Makes a step with the accumulated gradients, clipped to `max_norm`; clears them, returns their norm.
    ///
    /// # Errors
    /// Fails if loss, gradient or result is not a number. Adapter, optimizer and gradients are then
    /// unchanged.
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

/// Returns the log-probabilities of a microbatch's targets; with a `turn` it also adds the gradients.
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

/// A sum over tokens, in which each token has its own gradient.
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
