//! The time limit for drafting during a verification.
//!
//! Drafting is free if it ends before the verification that runs meanwhile. A draft run starts only if recent
//! durations predict that the run exceeds the wait by no more than what is left of the wait's allowance. The
//! allowance is the share [`MAX_SLOWDOWN`] of the expected wait, for all draft runs together.

use std::time::Duration;

use crate::verify_selection::MAX_SLOWDOWN;

/// Decay of the longest duration towards the latest, per run.
const LATEST: f64 = 1.0 / 16.0;

/// Time limit of the draft runs during one verification.
#[derive(Debug, Clone, Copy, Default)]
pub struct DraftDeadline {
    /// Longest of the last few durations, decaying.
    longest: Option<Duration>,
    /// Time by which the wait may still become longer.
    spare: Duration,
}

impl DraftDeadline {
    /// Begins a wait of about `takes`.
    pub fn begin(&mut self, takes: Duration) {
        self.spare = takes.mul_f64(MAX_SLOWDOWN);
    }

    /// Records the duration of one draft run.
    pub fn observe(&mut self, took: Duration) {
        let faded = self
            .longest
            .map_or(took, |longest| longest.saturating_sub(longest.saturating_sub(took).mul_f64(LATEST)));
        self.longest = Some(faded.max(took));
    }

    /// Returns the time by which the wait may still become longer.
    #[must_use]
    pub fn spare(&self) -> Duration {
        self.spare
    }

    /// Whether a draft run may start when the wait lasts `left` more. False until a run was observed.
    #[must_use]
    pub fn allows(&self, left: Duration) -> bool {
        self.longest.is_some_and(|longest| longest.saturating_sub(left) <= self.spare)
    }

    /// Records that a run which started with `left` of the wait remaining took `took`.
    pub fn spend(&mut self, left: Duration, took: Duration) {
        self.spare = self.spare.saturating_sub(took.saturating_sub(left));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn guesses_together_go_no_further_beyond_a_wait_than_was_promised() {
        let mut time = DraftDeadline::default();
        time.begin(ms(1_000));
        assert!(!time.allows(ms(900)), "nobody knows what one takes");
        time.observe(ms(30));
        assert!(time.allows(ms(30)) && time.allows(Duration::ZERO), "50 ms are to spare");
        time.spend(ms(10), ms(30));
        assert_eq!(time.spare(), ms(30));
        time.spend(ms(10), ms(35));
        assert!(!time.allows(ms(20)) && time.allows(ms(25)), "5 ms are left of them");
        time.begin(ms(200));
        assert_eq!(time.spare(), ms(10));
    }

    #[test]
    fn a_long_guess_is_forgotten_little_by_little() {
        let mut time = DraftDeadline::default();
        time.observe(ms(160));
        time.observe(ms(0));
        assert!(time.allows(ms(150)) && !time.allows(ms(149)));
        time.observe(ms(170));
        assert!(!time.allows(ms(169)));
    }
}
