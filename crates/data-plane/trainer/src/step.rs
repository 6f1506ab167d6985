//! One optimizer step: the gradient of a batch, and AdamW's update.
//!
//! # Layout
//!
//! - this file: steps from examples and from pairs
//! - `kto`: steps from rated answers
//! - `distil`: distillation from recorded answers of another model
//! - `grad_accumulation`: gradients accumulated over several batches
//! - `policy`: steps on the adapter's own answers
//! - `microbatch`: batches cut into microbatches; [`microbatch_pool`]: microbatches that run concurrently

mod distil;
mod grad_accumulation;
mod kto;
mod microbatch;
pub mod microbatch_pool;
mod policy;

use std::{error::Error, ops::Range};

use kernels::lora::{LayoutError, LoraPrecision};
use model::{
    adapter::MethodWeights,
    backward::{self, Dropout, Gradients, SavedScope, Tape, TrainError, TrainableAdapter, Trainer},
    forward::ModelContext,
};

use scheduling::random::Rng;

use crate::{
    checkpoint::BestAdapter,
    data::{Example, PreferencePair},
    loss::{self, AnswerLogprobs},
    optimizer::{Hyperparameters, OptimizerState, clip_global_norm},
};

pub use self::{
    distil::DistillScore,
    grad_accumulation::{BatchOutput, Direction, SequenceSample},
    kto::KtoOptions,
};

use self::{
    microbatch::{Inputs, parts, rows},
    microbatch_pool::{BorrowedBase, MicrobatchPool, RowCount as _},
};

/// Maximum rows of a microbatch; more would only take memory, because each row's bits are independent.
pub const BATCH_ROWS: usize = 512;

/// Maximum rows under way whose activations are all saved by the forward pass. Longer sequences run alone,
/// and the backward pass recomputes their activations.
const KEPT_ROWS: usize = 1024;

/// Separates the random numbers of dropout from others of the same seed.
const DROPOUT: u64 = 0x6472_6f70_6f75_7421;

/// Reason why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainStepError<E: Error + 'static> {
    /// The layer service failed.
    #[error(transparent)]
    Train(#[from] TrainError<E>),
    /// The adapter's matrices have shapes that the kernels do not support.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The loss or the gradient is not a number.
    #[error(
        "the {what} of step {step} is not a number; lower the learning rate, or check the data of this step"
    )]
    NotANumber {
        /// The value that is not a number: loss, gradient or result.
        what: &'static str,
        /// Number of the step, from 1.
        step: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepResult {
    /// Mean over the weights, or over pairs, before the step.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Number of rows that went through the model.
    pub rows: usize,
}

/// An adapter in training over a base that another process computes.
#[derive(Debug)]
pub struct TrainState<B> {
    lanes: MicrobatchPool<B>,
    /// Precision of the adapter where it will be served.
    precision: LoraPrecision,
    /// Current weights of the adapter.
    pub method: MethodWeights,
    /// Initial adapter, the reference of DPO and KTO.
    start: TrainableAdapter,
    pub state: OptimizerState,
    /// The adapter with the lowest held-out loss, if the job keeps it.
    pub best: Option<BestAdapter>,
    /// Dropout of the matrices' inputs while the adapter learns from examples.
    dropout: Option<Dropout>,
    gradients: Gradients,
}

impl<B: BorrowedBase> TrainState<B> {
    /// Makes the state of an adapter that begins as `start`.
    ///
    /// # Errors
    /// Fails if the matrices have shapes that the kernels do not support.
    pub fn new(
        lanes: MicrobatchPool<B>,
        precision: LoraPrecision,
        start: MethodWeights,
    ) -> Result<Self, TrainStepError<B::Error>> {
        let lengths: Vec<usize> = start.tensors().into_iter().map(<[f32]>::len).collect();
        let learner = TrainableAdapter::new(&start, &lanes.model().config, precision)?;
        let (state, gradients) = (OptimizerState::new(&lengths), Gradients::zero(&start));
        Ok(Self {
            lanes,
            precision,
            method: start,
            start: learner,
            state,
            best: None,
            dropout: None,
            gradients,
        })
    }

    /// Adds dropout with probability `rate` to the inputs of the adapter's matrices while it learns from
    /// examples; `seed` selects the dropped values. Preferences, ratings and
    /// evaluations use no dropout.
    #[must_use]
    pub fn with_dropout(self, rate: f64, seed: u64) -> Self {
        let key = Rng::seeded(seed ^ DROPOUT).bits(0);
        Self { dropout: (rate > 0.0).then_some(Dropout { rate, key }), ..self }
    }

    /// Returns the number of trained values.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.method.tensors().into_iter().map(<[f32]>::len).sum()
    }

    /// Returns the model without its linear layers.
    #[must_use]
    pub fn model(&self) -> &ModelContext {
        self.lanes.model()
    }

    /// Makes a step on `examples` that lowers the weighted mean of their cross-entropy.
    ///
    /// # Errors
    /// Fails if the executor is gone, or loss or gradient is not a number. The adapter is unchanged then.
    pub fn learn(
        &mut self,
        examples: &[&Example],
        hyper: &Hyperparameters,
        max_norm: f64,
    ) -> Result<StepResult, TrainStepError<B::Error>> {
        let total = weight(examples);
        let mut numbers = 0..;
        let inputs = |part: &[&Example]| {
            let dropouts = part.iter().zip(&mut numbers).filter_map(|(_, number)| self.dropped(number));
            let inputs = Inputs::of(part).dropping(dropouts);
            let loss = WeightedMean { weights: inputs.weights.clone(), total, sum: 0.0 };
            (inputs, loss)
        };
        let inputs: Vec<_> = parts(examples, rows).map(inputs).collect();
        self.teach(inputs, total, hyper, max_norm)
    }

    /// Makes a step on microbatches with their losses; `total` divides the sum of the losses.
    fn teach<L: TokenLoss + Send>(
        &mut self,
        inputs: Vec<(Inputs, L)>,
        total: f64,
        hyper: &Hyperparameters,
        max_norm: f64,
    ) -> Result<StepResult, TrainStepError<B::Error>> {
        let learner = self.learner()?;
        self.gradients.clear();
        let parts = inputs.into_iter().zip(self.gradients.turns());
        let learned = self.lanes.each(parts, |trainer, ((inputs, mut loss), turn)| {
            let tape = forward(trainer, &learner, &inputs)?;
            let rows = tape.rows();
            trainer.reverse(&learner, tape, &mut loss, turn)?;
            Ok((loss.sum(), rows))
        })?;
        let (sum, rows) = summed(learned);
        self.step(sum / total, rows, hyper, max_norm)
    }

    /// Makes a DPO step on `pairs`.
    ///
    /// # Errors
    /// Fails as [`learn`](Self::learn) does.
    pub fn prefer(
        &mut self,
        pairs: &[&PreferencePair],
        beta: f64,
        hyper: &Hyperparameters,
        max_norm: f64,
    ) -> Result<StepResult, TrainStepError<B::Error>> {
        let learner = self.learner()?;
        let (start, scale) = (&self.start, 1.0 / pairs.len() as f64);
        self.gradients.clear();
        let parts = pairs.iter().map(|pair| of_pair(pair)).zip(self.gradients.turns());
        let learned = self.lanes.each(parts, |trainer, (inputs, turn)| {
            let reference = log_probabilities(trainer, start, &inputs)?;
            let tape = forward(trainer, &learner, &inputs)?;
            let rows = 2 * tape.rows();
            let values = trainer.log_probabilities(&learner, &tape)?;
            let compared = compared(&inputs, &values, &reference, beta);
            let gradients = [compared.chosen_gradients, compared.rejected_gradients].concat();
            trainer.reverse(&learner, tape, &mut FixedGradients { gradients, scale }, turn)?;
            Ok((compared.loss, rows))
        })?;
        let (sum, rows) = summed(learned);
        self.step(sum / pairs.len() as f64, rows, hyper, max_norm)
    }

    /// Returns the mean loss of held-out examples; `None` without examples.
    ///
    /// # Errors
    /// Fails if the executor is gone.
    pub fn evaluate(&mut self, examples: &[&Example]) -> Result<Option<f64>, TrainStepError<B::Error>> {
        let learner = self.learner()?;
        let losses = self.lanes.each(parts(examples, rows).map(Inputs::of), |trainer, inputs| {
            let values = log_probabilities(trainer, &learner, &inputs)?;
            Ok(loss::cross_entropy(&values, &inputs.weights).loss)
        });
        let (sum, total) = (losses?.into_iter().fold(0.0, |sum, loss| sum + loss), weight(examples));
        Ok((total > 0.0).then(|| sum / total))
    }

    /// Returns the mean DPO loss of held-out pairs; `None` without pairs.
    ///
    /// # Errors
    /// Fails if the executor is gone.
    pub fn evaluate_pairs(
        &mut self,
        pairs: &[&PreferencePair],
        beta: f64,
    ) -> Result<Option<f64>, TrainStepError<B::Error>> {
        let learner = self.learner()?;
        let start = &self.start;
        let losses = self.lanes.each(pairs.iter().map(|pair| of_pair(pair)), |trainer, inputs| {
            let reference = log_probabilities(trainer, start, &inputs)?;
            let values = log_probabilities(trainer, &learner, &inputs)?;
            Ok(compared(&inputs, &values, &reference, beta).loss)
        });
        let sum = losses?.into_iter().fold(0.0, |sum, loss| sum + loss);
        Ok((!pairs.is_empty()).then(|| sum / pairs.len() as f64))
    }

    /// Drops the accumulated gradients.
    pub fn forget(&mut self) {
        self.gradients.clear();
    }

    fn learner(&self) -> Result<TrainableAdapter, TrainStepError<B::Error>> {
        Ok(TrainableAdapter::new(&self.method, &self.model().config, self.precision)?)
    }

    /// Returns the dropout of example `number` in this step.
    fn dropped(&self, number: u64) -> Option<Dropout> {
        let Dropout { rate, key } = self.dropout?;
        let of_step = Rng::keyed(key).bits(self.state.step);
        Some(Dropout { rate, key: Rng::keyed(of_step).bits(number) })
    }

    fn step(
        &mut self,
        loss: f64,
        rows: usize,
        hyper: &Hyperparameters,
        max_norm: f64,
    ) -> Result<StepResult, TrainStepError<B::Error>> {
        let not_a_number = |what| TrainStepError::NotANumber { what, step: self.state.step + 1 };
        if !loss.is_finite() {
            return Err(not_a_number("loss"));
        }
        let grad_norm = clip_global_norm(&mut self.gradients.tensors_mut(), max_norm);
        if !grad_norm.is_finite() {
            return Err(not_a_number("gradient"));
        }
        self.state.step(hyper, &mut self.method.tensors_mut(), &self.gradients.tensors());
        Ok(StepResult { loss, grad_norm, rows })
    }
}

fn forward<B: BorrowedBase>(
    trainer: &mut Trainer<B>,
    learner: &TrainableAdapter,
    inputs: &Inputs,
) -> Result<Tape, TrainError<B::Error>> {
    trainer.set_keep(if inputs.rows() > KEPT_ROWS { SavedScope::Inputs } else { SavedScope::All });
    trainer.forward(learner, &inputs.examples())
}

fn log_probabilities<B: BorrowedBase>(
    trainer: &mut Trainer<B>,
    learner: &TrainableAdapter,
    inputs: &Inputs,
) -> Result<Vec<f32>, TrainError<B::Error>> {
    trainer.set_keep(SavedScope::Inputs);
    let tape = trainer.forward(learner, &inputs.examples())?;
    trainer.log_probabilities(learner, &tape)
}

/// Returns the sums of losses and rows, added in order.
fn summed(parts: Vec<(f64, usize)>) -> (f64, usize) {
    parts.into_iter().fold((0.0, 0), |(sum, rows), (loss, own)| (sum + loss, rows + own))
}

fn of_pair(pair: &PreferencePair) -> Inputs {
    Inputs::of(&[&pair.chosen, &pair.rejected])
}

/// Returns the divisor of a weighted mean: the sum of the weights without their signs, which is never 0.
fn weight(examples: &[&Example]) -> f64 {
    examples.iter().flat_map(|example| &example.weights).map(|weight| f64::from(weight.abs())).sum()
}

fn compared(inputs: &Inputs, values: &[f32], reference: &[f32], beta: f64) -> loss::DpoResult {
    let answers = answers(inputs, values, reference);
    loss::dpo(beta, answers[0], answers[1])
}

/// Returns the log-probabilities of each example's answer.
fn answers<'a>(inputs: &'a Inputs, values: &'a [f32], reference: &'a [f32]) -> Vec<AnswerLogprobs<'a>> {
    let mut end = 0;
    let answer = |&count: &usize| {
        let range = end..end + count;
        end += count;
        AnswerLogprobs {
            logprobs: &values[range.clone()],
            reference_logprobs: &reference[range.clone()],
            weights: &inputs.weights[range],
        }
    };
    inputs.counts.iter().map(answer).collect()
}

/// A loss that is summed over tokens.
trait TokenLoss: backward::Loss {
    /// Returns the sum over the tokens so far.
    fn sum(&self) -> f64;
}

/// One microbatch of a weighted mean over tokens.
struct WeightedMean {
    weights: Vec<f32>,
    total: f64,
    sum: f64,
}

impl TokenLoss for WeightedMean {
    fn sum(&self) -> f64 {
        self.sum
    }
}

impl backward::Loss for WeightedMean {
    #[expect(clippy::cast_possible_truncation, reason = "gradients are numbers of 32 bits")]
    fn gradients(&mut self, targets: Range<usize>, log_probabilities: &[f32], gradients: &mut [f32]) {
        let evaluated = loss::cross_entropy(log_probabilities, &self.weights[targets]);
        self.sum += evaluated.loss;
        for (to, gradient) in gradients.iter_mut().zip(evaluated.gradients) {
            *to = (f64::from(gradient) / self.total) as f32;
        }
    }
}

/// Gradients that are known in advance, and their factor.
struct FixedGradients {
    gradients: Vec<f32>,
    scale: f64,
}

impl backward::Loss for FixedGradients {
    #[expect(clippy::cast_possible_truncation, reason = "gradients are numbers of 32 bits")]
    fn gradients(&mut self, targets: Range<usize>, _log_probabilities: &[f32], gradients: &mut [f32]) {
        for (to, &gradient) in gradients.iter_mut().zip(&self.gradients[targets]) {
            *to = (f64::from(gradient) * self.scale) as f32;
        }
    }
}
