//! How often and how soon a dead process is started again.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Deaths are counted over this long.
pub(crate) const WINDOW: Duration = Duration::from_secs(60);

/// This many deaths within [`WINDOW`] are enough.
pub(crate) const MAX_DEATHS: usize = 5;

const FIRST_DELAY: Duration = Duration::from_millis(100);

/// The recent deaths of one process.
#[derive(Debug, Default)]
pub(crate) struct Deaths(VecDeque<Instant>);

/// What to do about a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Start it again after this long.
    Restart(Duration),
    /// It will not get better.
    GiveUp,
}

impl Deaths {
    /// Counts a death at `now`. Each death within the window doubles the wait.
    pub(crate) fn another(&mut self, now: Instant) -> Verdict {
        self.0.retain(|death| now.duration_since(*death) < WINDOW);
        self.0.push_back(now);
        if self.0.len() >= MAX_DEATHS {
            return Verdict::GiveUp;
        }
        Verdict::Restart(FIRST_DELAY * (1 << (self.0.len() - 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_death_doubles_the_wait_and_the_fifth_within_a_minute_is_the_last() {
        let mut deaths = Deaths::default();
        let start = Instant::now();
        let verdicts: Vec<_> = (0..5).map(|i| deaths.another(start + Duration::from_secs(i * 14))).collect();
        let restart = |ms| Verdict::Restart(Duration::from_millis(ms));
        assert_eq!(verdicts, [restart(100), restart(200), restart(400), restart(800), Verdict::GiveUp]);
    }

    #[test]
    fn old_deaths_are_forgotten() {
        let mut deaths = Deaths::default();
        let start = Instant::now();
        for i in 0..50 {
            let verdict = deaths.another(start + WINDOW * i);
            assert_eq!(verdict, Verdict::Restart(FIRST_DELAY));
        }
    }
}
