//! How long a draft that computes may take: what it has earned, and a little beside.
//!
//! What is worth a guess follows from how often guesses come true and from what steps take ([`verify_selection`](crate::verify_selection)). Both are
//! estimates. So it is kept count of what came of them: a draft that costs more time than its tokens save stops, and is
//! tried again seldom, whatever the estimates say. Reading a text before the first guess is paid out of the same.

/// Steps that a draft may take the time of before it has earned any.
const ADVANCE_STEPS: f64 = 4.0;

/// Of the time that steps take, this part may be lost to a draft that saves nothing.
const LOST_PART: f64 = 0.01;

/// Steps' time that is saved up at most: what was earned long ago is no reason to lose it now.
const MAX_STEPS: f64 = 32.0;

/// Steps' time that is owed at most: a guess that somebody else's work held up says nothing of the next.
const MAX_OWED_STEPS: f64 = 1.0;

/// Time that may be spent on drafting.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DraftBudget {
    /// Seconds; `None` before the first step.
    left_s: Option<f64>,
}

impl DraftBudget {
    /// Seconds that may be spent now; 0 if there are none.
    #[must_use]
    pub fn left_s(&self) -> f64 {
        self.left_s.unwrap_or(0.0).max(0.0)
    }

    /// A step has taken place that takes `step_s` seconds without drafts.
    pub fn add_step(&mut self, step_s: f64) {
        let left_s = self.left_s.unwrap_or(ADVANCE_STEPS * step_s);
        let left_s = left_s.max(-MAX_OWED_STEPS * step_s) + LOST_PART * step_s;
        self.left_s = Some(left_s.min(MAX_STEPS * step_s));
    }

    /// Drafting has taken, or cost, so many seconds.
    pub fn spend(&mut self, seconds: f64) {
        self.left_s = self.left_s.map(|left_s| left_s - seconds);
    }

    /// Tokens that came true have saved so many seconds.
    pub fn earn(&mut self, seconds: f64) {
        self.spend(-seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds lost in so many steps of one second, by a draft that takes what it may and saves `saved` of it.
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
