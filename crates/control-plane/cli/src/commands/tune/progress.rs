//! Progress output of a run: each event as JSON, a progress bar on a terminal, or occasional lines
//! elsewhere.

use std::time::{Duration, Instant};

use control_protocol::training::{StepReport, TrainingEvent};

use super::format;
use crate::terminal::{
    PrintFormat, Terminal, progress::MonotonicProgress, sparkline::sparkline, table::pairs,
};

/// Shortest interval between two lines about steps.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Width of the curve beside a progress bar.
const CURVE_COLUMNS: usize = 16;

#[derive(Debug)]
pub(super) struct ProgressView {
    terminal: Terminal,
    asking: Option<MonotonicProgress>,
    bar: Option<MonotonicProgress>,
    held_out_loss: Option<f64>,
    /// Losses, or rewards of GRPO, by step.
    curve: Vec<f64>,
    last_line: Option<Instant>,
}

impl ProgressView {
    pub(super) fn new(terminal: Terminal) -> Self {
        Self { terminal, asking: None, bar: None, held_out_loss: None, curve: Vec::new(), last_line: None }
    }

    /// Shows an event; `line` is the event's original JSON line.
    pub(super) fn show(&mut self, event: &TrainingEvent, line: &str) {
        if self.terminal.format == PrintFormat::Json {
            return self.terminal.print(line);
        }
        match event {
            TrainingEvent::Plan(plan) => {
                let ink = self.terminal.ink();
                self.terminal.print(pairs(ink, &format::plan(plan)));
                if !plan.sample.is_empty() {
                    let of_data = format::sample(ink, &plan.sample);
                    self.terminal
                        .print(format!("\nthe first example, with what is learned in brackets:\n{of_data}"));
                }
            }
            TrainingEvent::Problem { .. } => {
                format::event(event).into_iter().for_each(|line| self.terminal.print(line))
            }
            TrainingEvent::Step(step) => self.step(step),
            TrainingEvent::Evaluation { loss, .. } => {
                self.held_out_loss = Some(*loss);
                self.line(event);
            }
            TrainingEvent::Checkpoint { .. } | TrainingEvent::Drafted { .. } => self.line(event),
            TrainingEvent::LearningRate(curve) => {
                self.end();
                self.terminal.print(format::learning_rates(self.terminal.ink(), curve));
            }
            TrainingEvent::Asked { prompts, of } => self.asked(*prompts, *of),
            // These events are shown after publishing, or with the final error.
            TrainingEvent::Done(_)
            | TrainingEvent::Failed { .. }
            | TrainingEvent::Published { .. }
            | TrainingEvent::Prompt(_)
            | TrainingEvent::Answered {}
            | TrainingEvent::Rollouts(_)
            | TrainingEvent::Other => {}
        }
    }

    /// Removes the progress bars.
    pub(super) fn end(&mut self) {
        [&self.asking, &self.bar].into_iter().flatten().for_each(MonotonicProgress::abandon);
    }

    fn step(&mut self, step: &StepReport) {
        if self.terminal.animates() {
            self.curve.push(format::goal(step));
            let curve = sparkline(&self.curve, CURVE_COLUMNS);
            let bar = self.bar.get_or_insert_with(|| self.terminal.progress("training".into()));
            let text = format!("{} {curve}", format::step(step, self.held_out_loss));
            return bar.at_step(step.step, step.steps, text);
        }
        let is_due = self.last_line.is_none_or(|last| last.elapsed() >= BETWEEN_LINES);
        if is_due || step.step == step.steps {
            self.last_line = Some(Instant::now());
            self.line(&TrainingEvent::Step(step.clone()));
        }
    }

    fn asked(&mut self, prompts: u64, of: u64) {
        if self.terminal.animates() {
            let bar = self.asking.get_or_insert_with(|| self.terminal.progress("asking".into()));
            bar.at_step(prompts, of, format!("{prompts} of {of} prompts"));
            if prompts == of {
                bar.finish();
            }
            return;
        }
        let is_due = self.last_line.is_none_or(|last| last.elapsed() >= BETWEEN_LINES);
        if is_due || prompts == of {
            self.last_line = Some(Instant::now());
            self.line(&TrainingEvent::Asked { prompts, of });
        }
    }

    /// Prints an event as a line where no progress bar is drawn.
    fn line(&self, event: &TrainingEvent) {
        if !self.terminal.animates() {
            format::event(event).into_iter().for_each(|line| self.terminal.note(line));
        }
    }
}
