//! The time that a drafter model may use: the time it saved plus a small allowance.
//!
//! Predictions are chosen by estimates ([`verify_selection`](crate::verify_selection)), but the budget counts
//! outcomes: a drafter that costs more time than it saves stops and is retried rarely. Prefill counts too.

/// Initial budget, in step durations, before the drafter has saved any time.
const ADVANCE_STEPS: f64 = 4.0;

/// Fraction of the step time that a drafter may cost while it brings no benefit.
const LOST_PART: f64 = 0.01;

/// Maximum budget, in step durations: savings of long ago do not justify losses now.
const MAX_STEPS: f64 = 32.0;

/// Maximum debt, in step durations: a prediction that other work delayed says nothing about the next.
const MAX_OWED_STEPS: f64 = 1.0;

/// Time budget of a drafter model.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DraftBudget {
    /// Seconds; `None` before the first step.
    left_s: Option<f64>,
}

impl DraftBudget {
    /// Returns the seconds that may be spent now; 0 if the budget is exhausted.
    #[must_use]
    pub fn left_s(&self) -> f64 {
        self.left_s.unwrap_or(0.0).max(0.0)
    }

    /// Records a step that takes `step_s` seconds without drafts.
    pub fn add_step(&mut self, step_s: f64) {
        let left_s = self.left_s.unwrap_or(ADVANCE_STEPS * step_s);
        let left_s = left_s.max(-MAX_OWED_STEPS * step_s) + LOST_PART * step_s;
        self.left_s = Some(left_s.min(MAX_STEPS * step_s));
    }

    /// Subtracts seconds that drafting took or cost.
    pub fn spend(&mut self, seconds: f64) {
        self.left_s = self.left_s.map(|left_s| left_s - seconds);
    }

    /// Adds seconds that accepted draft tokens saved.
    pub fn earn(&mut self, seconds: f64) {
        self.spend(-seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the seconds lost in `steps` steps of 1 s by a drafter that saves a fraction of its budget.
    fn lost(steps: usize, saved: f64) -> f64 {
        let (mut allowance, mut lost) = (DraftBudget::default(), 0.0);
        for _ in 0..steps {
            let spent = allowance.left_s();
            allowance.spend(spent);
            allowance.earn(saved * spent);
            lost += spent * (1.0 - saved);
            allowance.add_step(1.0);
        }
        lost
    }

    #[test]
    fn a_draft_that_saves_nothing_costs_a_hundredth_and_an_advance() {
        assert!(lost(1000, 0.0) < 0.01 * 1000.0 + ADVANCE_STEPS);
        assert!(lost(1000, 0.9) < 0.01 * 1000.0 + ADVANCE_STEPS);
    }

    #[test]
    fn what_was_earned_is_not_saved_up_without_bound() {
        let mut allowance = DraftBudget::default();
        assert_eq!(allowance.left_s(), 0.0);
        for _ in 0..1000 {
            allowance.add_step(1.0);
            allowance.earn(5.0);
        }
        allowance.add_step(1.0);
        assert_eq!(allowance.left_s(), MAX_STEPS);
    }

    #[test]
    fn one_guess_that_took_ages_is_forgiven() {
        let mut allowance = DraftBudget::default();
        allowance.add_step(1.0);
        allowance.spend(1000.0);
        assert_eq!(allowance.left_s(), 0.0);
        (0..101).for_each(|_| allowance.add_step(1.0));
        assert!(allowance.left_s() > 0.0, "{allowance:?}");
    }
}
