//! Event records made from a trainer's reports.

use std::{collections::BTreeMap, fmt::Write as _};

use control_protocol::training::{StepReport, TrainingEvent};

use super::records::{CheckpointRecord, EventLevel, EventRecord, JobRecord, JobStatus, StepMetrics};
use crate::clock::seconds_since_1970;

/// Maximum number of step events per job; longer jobs record every second step, every third, and so on.
const MAX_STEP_EVENTS: u64 = 1000;
/// Maximum number of data problems that a message names.
const MAX_PROBLEMS: usize = 20;

/// Formats the metrics of a job as CSV, the oldest step first.
pub(super) fn table(metrics: impl Iterator<Item = StepMetrics>) -> String {
    let mut steps: BTreeMap<u64, StepMetrics> = BTreeMap::new();
    for metrics in metrics {
        // A repeated step has the same metrics.
        let of_step = steps.entry(metrics.step).or_insert(metrics);
        of_step.valid_loss = of_step.valid_loss.or(metrics.valid_loss);
        if metrics.train_loss.is_some() {
            *of_step = StepMetrics { valid_loss: of_step.valid_loss, ..metrics };
        }
    }
    let mut text = "step,train_loss,valid_loss,grad_norm,learning_rate\n".to_owned();
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    for (step, StepMetrics { train_loss, valid_loss, grad_norm, learning_rate, .. }) in steps {
        let [train, valid, norm, rate] = [train_loss, valid_loss, grad_norm, learning_rate].map(number);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{step},{train},{valid},{norm},{rate}");
    }
    text
}

/// Appends the data problems with their line numbers to `message`.
pub(super) fn with_problems(message: String, problems: &[(u64, String)]) -> String {
    let named = problems.iter().take(MAX_PROBLEMS).map(|(line, what)| format!("line {line}: {what}"));
    let more = problems.len().saturating_sub(MAX_PROBLEMS);
    let more = (more > 0).then(|| format!("and {more} more"));
    let all: Vec<String> = named.chain(more).collect();
    if all.is_empty() { message } else { all.join("; ") }
}

/// Applies `event` to `job` and returns the events to record. A checkpoint is pending until it is
/// [`confirmed`].
pub(super) fn noted(job: &mut JobRecord, event: TrainingEvent) -> Vec<EventRecord> {
    // A trainer that is told to stop ends its step first, and writes a checkpoint.
    let is_heard =
        job.status.is_due() || matches!(event, TrainingEvent::Step(_) | TrainingEvent::Checkpoint { .. });
    if !is_heard || job.status.is_final() {
        return Vec::new();
    }
    match event {
        TrainingEvent::Plan(plan) => {
            let message = match job.plan.is_some() {
                true => format!("continuing after step {}", plan.resumed_step.unwrap_or(0)),
                false => format!("fine-tuning started: {} examples, {} steps", plan.examples, plan.steps),
            };
            let resumed_step = plan.resumed_step.unwrap_or(0);
            // Steps after the checkpoint are computed again.
            if resumed_step != job.step {
                let mark = job.mark.filter(|mark| mark.step == resumed_step);
                job.trained_tokens = mark.map_or(0, |mark| mark.trained_tokens);
            }
            job.step = resumed_step;
            job.pending_marks.clear();
            job.started_at.get_or_insert_with(seconds_since_1970);
            (job.status, job.plan) = (JobStatus::Running, Some(plan));
            vec![EventRecord::now(EventLevel::Info, message)]
        }
        TrainingEvent::Step(step) => of_step(job, &step),
        TrainingEvent::Evaluation { step, loss } => {
            let marks = job.pending_marks.iter_mut().chain(&mut job.mark);
            marks.filter(|mark| mark.step == step).for_each(|mark| mark.held_out_loss = Some(loss));
            let total_steps = job.plan.as_ref().map_or(0, |plan| plan.steps);
            let metrics = StepMetrics { step, total_steps, valid_loss: Some(loss), ..StepMetrics::default() };
            let message = format!("step {step}/{total_steps}: validation loss={loss:.4}");
            vec![EventRecord { metrics: Some(metrics), ..EventRecord::now(EventLevel::Info, message) }]
        }
        TrainingEvent::Checkpoint { step } => {
            let JobRecord { loss, trained_tokens, .. } = *job;
            let at = seconds_since_1970();
            job.pending_marks.push(CheckpointRecord { step, loss, held_out_loss: None, trained_tokens, at });
            vec![EventRecord::now(EventLevel::Info, format!("checkpoint after step {step}"))]
        }
        _ => Vec::new(),
    }
}

/// Records that the job can resume after `step`, and no longer from an earlier checkpoint.
pub(super) fn confirmed(job: &mut JobRecord, step: u64) {
    job.mark = job.pending_marks.iter().find(|mark| mark.step == step).copied().or(job.mark);
    job.pending_marks.retain(|mark| mark.step > step);
}

fn of_step(job: &mut JobRecord, step: &StepReport) -> Vec<EventRecord> {
    if step.step <= job.step {
        // The step was recorded already, but the confirmation was lost.
        return Vec::new();
    }
    let now = seconds_since_1970();
    job.step = step.step;
    job.trained_tokens += step.tokens;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number of seconds")]
    let left = step.seconds_left.map(|left| left.clamp(0.0, 1e9) as u64);
    job.estimated_finish = left.map(|left| now + left);
    job.loss = Some(step.loss);
    let stride = step.steps.div_ceil(MAX_STEP_EVENTS).max(1);
    if !step.step.is_multiple_of(stride) && step.step != step.steps {
        return Vec::new();
    }
    let message = format!("step {}/{}: training loss={:.4}", step.step, step.steps, step.loss);
    let metrics = StepMetrics {
        step: step.step,
        total_steps: step.steps,
        train_loss: Some(step.loss),
        grad_norm: Some(step.grad_norm),
        learning_rate: Some(step.learning_rate),
        valid_loss: None,
    };
    vec![EventRecord { metrics: Some(metrics), ..EventRecord::now(EventLevel::Info, message) }]
}
