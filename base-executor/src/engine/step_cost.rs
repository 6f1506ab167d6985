//! What steps take, by their rows.

use std::time::Duration;

use scheduling::perf::{fit::Fit, linear_fit::LinearFit};

/// What a row adds to a step, as a part of a step of one row, until steps of several sizes were seen.
const SUPPOSED_SLOPE: f64 = 0.1;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct StepCost {
    fit: Fit<LinearFit>,
    /// Rows of the smallest and the largest step.
    seen: Option<(usize, usize)>,
}

impl StepCost {
    /// A step of so many rows, each with logits, took so long.
    pub(super) fn observe(&mut self, rows: usize, took: Duration) {
        self.fit.observe(rows as f64, took.as_secs_f64());
        let (least, most) = self.seen.unwrap_or((rows, rows));
        self.seen = Some((least.min(rows), most.max(rows)));
    }

    /// Rows to seconds; `None` before the first.
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
