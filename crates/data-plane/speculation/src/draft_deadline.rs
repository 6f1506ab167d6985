//! How much longer than somebody waits anyway guesses may keep them.
//!
//! What is guessed while something is verified takes no time as long as it is done when that is. So a guess is begun only if it
//! will be, by what the last few took; what they may go beyond that is [`MAX_SLOWDOWN`] of the wait, all guesses together.

use std::time::Duration;

use crate::verify_selection::MAX_SLOWDOWN;

/// What of a longer guess before the latest is forgotten.
const LATEST: f64 = 1.0 / 16.0;

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct DraftDeadline {
    /// Of the last few guesses the longest.
    longest: Option<Duration>,
    /// How much longer the wait may still become.
    spare: Duration,
}

impl DraftDeadline {
    /// Something begins that takes about so long.
    pub fn begin(&mut self, takes: Duration) {
        self.spare = takes.mul_f64(MAX_SLOWDOWN);
    }

    /// A guess took so long.
    pub fn observe(&mut self, took: Duration) {
        let faded = self
            .longest
            .map_or(took, |longest| longest.saturating_sub(longest.saturating_sub(took).mul_f64(LATEST)));
        self.longest = Some(faded.max(took));
    }

    /// How much longer the wait may still become.
    #[must_use]
    pub fn spare(&self) -> Duration {
        self.spare
    }

    /// Whether a guess may be begun of which nobody takes note for `left`; not the first, which nobody knows anything of.
    #[must_use]
    pub fn allows(&self, left: Duration) -> bool {
        self.longest.is_some_and(|longest| longest.saturating_sub(left) <= self.spare)
    }

    /// What was begun with `left` left took so long.
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
