//! The duration of steps, by their rows.

use std::time::Duration;

use scheduling::perf::{fit::Fit, linear_fit::LinearFit};

/// Assumed cost of a row, as a fraction of a one-row step, before steps of several sizes were measured.
const SUPPOSED_SLOPE: f64 = 0.1;

/// Line fitted to step durations.
#[derive(Debug, Default)]
pub(super) struct StepCost {
    fit: Fit<LinearFit>,
    /// Rows of the smallest and of the largest step.
    seen: Option<(usize, usize)>,
}

impl StepCost {
    /// Records a step of `rows` rows, each with logits, that took `took`.
    pub(super) fn observe(&mut self, rows: usize, took: Duration) {
        self.fit.observe(rows as f64, took.as_secs_f64());
        let (least, most) = self.seen.unwrap_or((rows, rows));
        self.seen = Some((least.min(rows), most.max(rows)));
    }

    /// Returns the duration in seconds by rows; `None` before the first step.
    pub(super) fn line(&self) -> Option<LinearFit> {
        let (line, (least, most)) = (self.fit.line()?, self.seen?);
        if least < most {
            return Some(line);
        }
        let step = line.at(least as f64);
        let alpha = SUPPOSED_SLOPE * step / least as f64;
        Some(LinearFit { alpha, beta: step - alpha * least as f64 })
    }
}
