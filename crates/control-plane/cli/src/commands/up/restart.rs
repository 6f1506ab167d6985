//! Delay and limit of restarts of a dead process.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::deployment::config::RestartPolicy;

/// Window in which deaths are counted; older deaths are forgotten.
pub(crate) const WINDOW: Duration = Duration::from_secs(60);

/// Longest delay before a restart; a longer delay has no benefit.
const MAX_DELAY: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct RestartCounter {
    policy: RestartPolicy,
    recent: VecDeque<Instant>,
}

/// Reaction to a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RestartDecision {
    /// Restart after this delay.
    Restart(Duration),
    /// Too many deaths within the window.
    GiveUp {
        /// Number of deaths within the window.
        deaths: usize,
    },
}

impl RestartCounter {
    pub(crate) fn new(policy: RestartPolicy) -> Self {
        Self { policy, recent: VecDeque::new() }
    }

    /// Counts a death at `now`. Each death within the window doubles the delay.
    pub(crate) fn another(&mut self, now: Instant) -> RestartDecision {
        self.recent.retain(|death| now.duration_since(*death) < WINDOW);
        self.recent.push_back(now);
        let deaths = self.recent.len();
        if deaths >= self.policy.max_crashes_per_min as usize {
            return RestartDecision::GiveUp { deaths };
        }
        let doublings = u32::try_from(deaths - 1).unwrap_or(u32::MAX);
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        RestartDecision::Restart(self.policy.first_delay.saturating_mul(factor).min(MAX_DELAY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST_DELAY: Duration = Duration::from_millis(100);

    fn deaths(max_crashes_per_min: u32) -> RestartCounter {
        RestartCounter::new(RestartPolicy { max_crashes_per_min, first_delay: FIRST_DELAY })
    }

    #[test]
    fn each_death_doubles_the_wait_and_the_fifth_within_a_minute_is_the_last() {
        let mut deaths = deaths(5);
        let start = Instant::now();
        let verdicts: Vec<_> = (0..5).map(|i| deaths.another(start + Duration::from_secs(i * 14))).collect();
        let restart = |ms| RestartDecision::Restart(Duration::from_millis(ms));
        let end = RestartDecision::GiveUp { deaths: 5 };
        assert_eq!(verdicts, [restart(100), restart(200), restart(400), restart(800), end]);
    }

    #[test]
    fn a_process_that_was_up_for_a_minute_starts_afresh() {
        let mut deaths = deaths(5);
        let start = Instant::now();
        for i in 0..50 {
            let verdict = deaths.another(start + WINDOW * i);
            assert_eq!(verdict, RestartDecision::Restart(FIRST_DELAY));
        }
    }

    #[test]
    fn however_many_deaths_are_allowed_the_wait_stays_bounded() {
        let mut deaths = deaths(u32::MAX);
        let start = Instant::now();
        let last = (0..200).map(|_| deaths.another(start)).last();
        assert_eq!(last, Some(RestartDecision::Restart(MAX_DELAY)));
    }
}
