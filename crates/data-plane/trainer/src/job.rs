//! A training job from its first step to its last, with an event per step.
//!
//! # Layout
//!
//! - this file: the job
//! - `learning_rate`: a sweep over learning rates, which finds a good one for a job

mod learning_rate;

use std::{error::Error, time::Instant};

use control_protocol::training::{
    Correctness, StepReport, TrainingEvent,
    rollout::{RewardReport, RolloutReply, RolloutRequest},
};

use crate::{
    batch_sampler::{Batches, split},
    checkpoint::{BestAdapter, Checkpoint, CheckpointError, CheckpointOrigin},
    data::{DataItems, DistillationSample, Example, PreferencePair, RatedAnswer, RolloutItem},
    draft::DraftTraining,
    grpo::{RolloutError, RolloutSampling},
    peft::WriteError,
    plan::JobPlan,
    schedule::Schedule,
    step::{StepResult, TrainState, TrainStepError, microbatch_pool::BorrowedBase},
};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum JobEnd {
    Done {
        /// Loss of the last step's batch.
        loss: Option<f64>,
        held_out_loss: Option<f64>,
        /// Step after which the held-out loss was lowest, if the job keeps the adapter of that step.
        best_step: Option<u64>,
    },
    /// The listener stopped the job; a checkpoint was written if the job has a directory for it.
    Stopped {
        /// Number of steps that were made.
        step: u64,
    },
}

/// Reason why a job failed.
#[derive(Debug, thiserror::Error)]
pub enum JobError<E: Error + 'static> {
    #[error(transparent)]
    Learn(#[from] TrainStepError<E>),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The listener cannot receive events any more, or sends answers that cannot be read.
    #[error("cannot write the events of the job, or read the answers to these")]
    Tell(#[from] std::io::Error),
    /// The adapter cannot be written for the sampler.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The sampler's answers do not fit the request.
    #[error("the answers of step {step} cannot be learned")]
    Rollouts {
        /// Number of the step, from 1.
        step: u64,
        source: RolloutError,
    },
}

/// Mean loss per token of a draft on held-out answers, and the fraction of correct predictions by kind of
/// text.
type DraftScore = (Option<f64>, Vec<Correctness>);

/// Receiver of a job's events, which may also stop the job.
pub trait JobListener {
    /// Receives an event.
    ///
    /// # Errors
    /// Fails if the event cannot be delivered; the job then fails.
    fn hear(&mut self, event: &TrainingEvent) -> std::io::Result<()>;

    /// True once the job has to stop.
    fn wants_stop(&self) -> bool;

    /// Returns the requested answers of the adapter and their rewards; `None` once the job has to stop.
    ///
    /// # Errors
    /// Fails if this listener has no sampler, or the sampler's reply cannot be read.
    fn draw(&mut self, _request: RolloutRequest) -> std::io::Result<Option<RolloutReply>> {
        Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "nobody draws answers of the adapter"))
    }
}

/// Result of a step, and the rewards of the answers that it learned.
type StepOutcome = (StepResult, Option<RewardReport>);

/// Examples or pairs, split into training and held-out items.
#[derive(Debug)]
pub struct DatasetSplit {
    learned: DataItems,
    held_out: DataItems,
}

impl DatasetSplit {
    /// Splits the lines of `items` as the plan says, or holds out `validation` instead. All examples of one
    /// conversation are on the same side, because each contains the answers of the earlier ones.
    #[must_use]
    pub fn new(items: DataItems, validation: Option<DataItems>, plan: &JobPlan) -> Self {
        if let Some(held_out) = validation {
            return Self { learned: items, held_out };
        }
        let lines = items.of_lines();
        let (learned, held_out) = split(lines.len(), plan.held_out, plan.seed);
        let pick = |chosen: Vec<usize>| {
            items.pick(&chosen.into_iter().flat_map(|line| lines[line].clone()).collect::<Vec<_>>())
        };
        Self { learned: pick(learned), held_out: pick(held_out) }
    }

    /// Returns the items to learn from.
    #[must_use]
    pub fn learned(&self) -> &DataItems {
        &self.learned
    }

    /// Returns the held-out items.
    #[must_use]
    pub fn held_out(&self) -> &DataItems {
        &self.held_out
    }

    /// Returns the batches, and the number of steps.
    #[must_use]
    pub fn batches(&self, plan: &JobPlan) -> (Batches, u64) {
        let batches = Batches::new(self.learned.len(), plan.batch_size, plan.epochs, plan.seed);
        let steps = batches.steps().min(plan.max_steps.unwrap_or(u64::MAX));
        (batches, steps)
    }
}

/// Speed of a job since it began or resumed.
struct JobThroughput {
    begun: Instant,
    /// Number of steps that were made before.
    first: u64,
    tokens: usize,
}

impl JobThroughput {
    fn at(first: u64) -> Self {
        Self { begun: Instant::now(), first, tokens: 0 }
    }

    /// Returns the report of step `step` of `steps`, which ended now, without its rate, lines and rewards.
    fn report(&mut self, step: u64, steps: u64, outcome: StepResult) -> StepReport {
        self.tokens += outcome.rows;
        let seconds = self.begun.elapsed().as_secs_f64();
        StepReport {
            step,
            steps,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            tokens: outcome.rows as u64,
            tokens_per_second: Some(self.tokens as f64 / seconds),
            seconds_left: Some(seconds / (step - self.first) as f64 * (steps - step) as f64),
            ..StepReport::default()
        }
    }
}

#[derive(Debug)]
pub struct TrainingJob {
    pub plan: JobPlan,
    pub course: DatasetSplit,
    /// The draft to train, if any; then `course` holds recorded answers of a model.
    pub draft: Option<DraftTraining>,
    /// Sampling of the adapter's own answers, if these are learned; then `course` holds prompts.
    pub sampling: Option<RolloutSampling>,
    pub origin: CheckpointOrigin,
    /// Directory of the checkpoint.
    pub checkpoints: Option<std::path::PathBuf>,
    /// Number of steps between two checkpoints.
    pub checkpoint_steps: u64,
}

impl TrainingJob {
    /// Trains from the current step of `learning` to the last step.
    ///
    /// # Errors
    /// Fails if the executor is gone, a loss is not a number, or a checkpoint write fails; the last is kept.
    pub fn run<B: BorrowedBase>(
        &self,
        learning: &mut TrainState<B>,
        listener: &mut dyn JobListener,
    ) -> Result<JobEnd, JobError<B::Error>> {
        let (batches, steps) = self.course.batches(&self.plan);
        let JobPlan { decay, warmup_steps, .. } = self.plan;
        let schedule = Schedule { decay, warmup_steps, total_steps: steps };
        let mut throughput = JobThroughput::at(learning.state.step);
        let (mut last, mut judged) = (None, None);
        for batch in batches.starting_at(learning.state.step) {
            let step = learning.state.step;
            if step >= steps || self.has_stalled(learning) {
                break;
            }
            if listener.wants_stop() {
                self.keep(learning, listener)?;
                return Ok(JobEnd::Stopped { step });
            }
            let learning_rate = self.plan.learning_rate * schedule.multiplier(step);
            let Some((outcome, rewards)) = self.advance(learning, &batch, learning_rate, listener)? else {
                self.keep(learning, listener)?;
                return Ok(JobEnd::Stopped { step });
            };
            last = Some(outcome.loss);
            let step = step + 1;
            listener.hear(&TrainingEvent::Step(StepReport {
                learning_rate,
                lines: self.course.learned.lines(&batch),
                rewards,
                ..throughput.report(step, steps, outcome)
            }))?;
            if step < steps && step.is_multiple_of(self.checkpoint_steps) {
                judged = Some((step, self.judge(learning, listener)?));
            }
        }
        let held_out_loss = match judged {
            Some((step, loss)) if step == learning.state.step => loss,
            _ => self.judge(learning, listener)?,
        };
        let Some(best) = learning.best.take() else {
            return Ok(JobEnd::Done { loss: last, held_out_loss, best_step: None });
        };
        learning.method = best.method;
        Ok(JobEnd::Done { loss: last, held_out_loss: Some(best.loss), best_step: Some(best.step) })
    }

    /// Returns true if the held-out loss has not become lower for as many evaluations as the plan allows.
    fn has_stalled<B: BorrowedBase>(&self, learning: &TrainState<B>) -> bool {
        let since = learning.best.as_ref().map_or(0, |best| best.evaluations_since);
        self.plan.patience.is_some_and(|patience| since >= patience)
    }

    /// Makes a step on a batch, whose prompts the adapter answers first; returns `None` if the job has to
    /// stop before the step.
    fn advance<B: BorrowedBase>(
        &self,
        learning: &mut TrainState<B>,
        batch: &[usize],
        rate: f64,
        listener: &mut dyn JobListener,
    ) -> Result<Option<StepOutcome>, JobError<B::Error>> {
        if let DataItems::Prompts(all) = &self.course.learned {
            let prompts: Vec<&RolloutItem> = batch.iter().map(|&number| &all[number]).collect();
            return self.reinforce(learning, &prompts, rate, listener);
        }
        Ok(Some((self.step(learning, batch, rate)?, None)))
    }

    /// Makes a step on a batch of the data.
    fn step<B: BorrowedBase>(
        &self,
        learning: &mut TrainState<B>,
        batch: &[usize],
        rate: f64,
    ) -> Result<StepResult, TrainStepError<B::Error>> {
        let (hyper, norm) = (self.plan.hyperparameters(rate), self.plan.max_grad_norm);
        match &self.course.learned {
            DataItems::Examples(all) => {
                let examples: Vec<&Example> = batch.iter().map(|&number| &all[number]).collect();
                learning.learn(&examples, &hyper, norm)
            }
            DataItems::Pairs(all) => {
                let pairs: Vec<&PreferencePair> = batch.iter().map(|&number| &all[number]).collect();
                learning.prefer(&pairs, self.plan.beta, &hyper, norm)
            }
            DataItems::Rated(all) => {
                let rated: Vec<&RatedAnswer> = batch.iter().map(|&number| &all[number]).collect();
                learning.rate(&rated, self.plan.kto(), &hyper, norm)
            }
            DataItems::Said(all) => {
                let said: Vec<&DistillationSample> = batch.iter().map(|&number| &all[number]).collect();
                learning.distil(&said, &hyper, norm)
            }
            DataItems::Prompts(_) => unreachable!("a step needs answers to prompts"),
        }
    }

    /// Draws answers to `prompts` and makes a step on these.
    fn reinforce<B: BorrowedBase>(
        &self,
        learning: &mut TrainState<B>,
        prompts: &[&RolloutItem],
        rate: f64,
        listener: &mut dyn JobListener,
    ) -> Result<Option<StepOutcome>, JobError<B::Error>> {
        let sampling = self.sampling.as_ref().expect("a job on prompts has a sampling");
        let (step, vocabulary) = (learning.state.step + 1, learning.model().config.vocab_size);
        let adapter = sampling.write(&learning.method, &learning.model().config)?;
        let drawn = listener.draw(sampling.plan.request(prompts, step, self.plan.seed, adapter))?;
        let Some(reply) = drawn else { return Ok(None) };
        let of_step = |source| JobError::Rollouts { step, source };
        let (answers, rewards) = sampling.plan.sequences(prompts, &reply, vocabulary).map_err(of_step)?;
        let (hyper, norm) = (self.plan.hyperparameters(rate), self.plan.max_grad_norm);
        let (stepped, logprob_difference) = learning.reinforce(&answers, &hyper, norm)?;
        Ok(Some((stepped, Some(RewardReport { logprob_difference, ..rewards }))))
    }

    fn keep<B: BorrowedBase>(
        &self,
        learning: &TrainState<B>,
        listener: &mut dyn JobListener,
    ) -> Result<(), JobError<B::Error>> {
        let Some(directory) = &self.checkpoints else { return Ok(()) };
        let (origin, method, state) = (self.origin.clone(), learning.method.clone(), learning.state.clone());
        let best = learning.best.clone();
        Checkpoint { origin, method, state, gradients: None, best }.write(directory)?;
        Ok(listener.hear(&TrainingEvent::Checkpoint { step: learning.state.step })?)
    }

    /// Measures the held-out items, and writes a checkpoint that knows the result.
    fn judge<B: BorrowedBase>(
        &self,
        learning: &mut TrainState<B>,
        listener: &mut dyn JobListener,
    ) -> Result<Option<f64>, JobError<B::Error>> {
        let step = learning.state.step;
        let (loss, kinds) = match &self.course.held_out {
            DataItems::Examples(all) => (learning.evaluate(&all.iter().collect::<Vec<_>>())?, Vec::new()),
            DataItems::Pairs(all) => {
                let pairs: Vec<_> = all.iter().collect();
                (learning.evaluate_pairs(&pairs, self.plan.beta)?, Vec::new())
            }
            DataItems::Rated(all) => {
                let rated: Vec<_> = all.iter().collect();
                (learning.evaluate_rated(&rated, self.plan.kto(), self.plan.batch_size)?, Vec::new())
            }
            DataItems::Said(all) => self.judge_draft(all, learning)?,
            // A job on prompts holds out none of these.
            DataItems::Prompts(_) => (None, Vec::new()),
        };
        if let Some(loss) = loss.filter(|_| self.plan.keep_best) {
            learning.best = Some(BestAdapter::after(learning.best.take(), step, loss, &learning.method));
        }
        self.keep(learning, listener)?;
        if !kinds.is_empty() {
            listener.hear(&TrainingEvent::Drafted { step, kinds })?;
        }
        if let Some(loss) = loss {
            listener.hear(&TrainingEvent::Evaluation { step, loss })?;
        }
        Ok(loss)
    }

    /// Measures a draft on held-out answers.
    fn judge_draft<B: BorrowedBase>(
        &self,
        held_out: &[DistillationSample],
        learning: &mut TrainState<B>,
    ) -> Result<DraftScore, JobError<B::Error>> {
        let shortlist = self.draft.as_ref().map_or(&[][..], |draft| &draft.shortlist);
        let met = learning.meet(&held_out.iter().collect::<Vec<_>>(), shortlist)?;
        let mut kinds: Vec<Correctness> = Vec::new();
        for (said, met) in held_out.iter().zip(&met).filter(|(said, _)| said.is_greedy) {
            let at = kinds.iter().position(|known| known.kind == said.kind).unwrap_or_else(|| {
                kinds.push(Correctness { kind: said.kind.clone(), ..Correctness::default() });
                kinds.len() - 1
            });
            kinds[at].right += met.right;
            kinds[at].tokens += met.tokens;
        }
        kinds.sort_by(|a, b| a.kind.cmp(&b.kind));
        let (loss, tokens) =
            met.iter().fold((0.0, 0), |(loss, tokens), met| (loss + met.loss, tokens + met.tokens));
        Ok(((tokens > 0).then(|| loss / tokens as f64), kinds))
    }
}
