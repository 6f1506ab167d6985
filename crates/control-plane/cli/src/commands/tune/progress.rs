//! What is shown of a run under way: every line as JSON, else a bar on a terminal and a line now and then elsewhere.

use std::time::{Duration, Instant};

use control_protocol::training::{StepReport, TrainingEvent};

use super::format;
use crate::terminal::{PrintFormat, Terminal, progress::MonotonicProgress, table::pairs};

/// Between two lines about steps.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Shows a run.
#[derive(Debug)]
pub(super) struct ProgressView {
    terminal: Terminal,
    asking: Option<MonotonicProgress>,
    bar: Option<MonotonicProgress>,
    held_out_loss: Option<f64>,
    last_line: Option<Instant>,
}

impl ProgressView {
    /// Shows a run at `terminal`.
    pub(super) fn new(terminal: Terminal) -> Self {
        Self { terminal, asking: None, bar: None, held_out_loss: None, last_line: None }
    }

    /// Shows what was said; `line` is the event as it came.
    pub(super) fn show(&mut self, event: &TrainingEvent, line: &str) {
        if self.terminal.format == PrintFormat::Json {
            return self.terminal.print(line);
        }
        match event {
            TrainingEvent::Plan(plan) => self.terminal.print(pairs(self.terminal.ink(), &format::plan(plan))),
            TrainingEvent::Problem { .. } => {
                format::event(event).into_iter().for_each(|line| self.terminal.print(line))
            }
            TrainingEvent::Step(step) => self.step(step),
            TrainingEvent::Evaluation { loss, .. } => {
                self.held_out_loss = Some(*loss);
                self.line(event);
            }
            TrainingEvent::Checkpoint { .. } | TrainingEvent::Drafted { .. } => self.line(event),
            TrainingEvent::Asked { prompts, of } => self.asked(*prompts, *of),
            // Said once it is served, or with the error that ends it all.
            TrainingEvent::Done(_)
            | TrainingEvent::Failed { .. }
            | TrainingEvent::Published { .. }
            | TrainingEvent::Prompt(_)
            | TrainingEvent::Answered {}
            | TrainingEvent::Other => {}
        }
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self) {
        [&self.asking, &self.bar].into_iter().flatten().for_each(MonotonicProgress::abandon);
    }

    fn step(&mut self, step: &StepReport) {
        if self.terminal.animates() {
            let bar = self.bar.get_or_insert_with(|| self.terminal.progress("training".into()));
            return bar.at_step(step.step, step.steps, format::step(step, self.held_out_loss));
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

    /// A line, where no bar is.
    fn line(&self, event: &TrainingEvent) {
        if !self.terminal.animates() {
            format::event(event).into_iter().for_each(|line| self.terminal.note(line));
        }
    }
}
