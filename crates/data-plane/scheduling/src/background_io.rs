//! Limits background use of a disk beside foreground use, such as reading streamed weights.
//!
//! ```text
//! first     |#####|  |#######################|         |######|
//! others    o     o oo  o         o         o ooooooooo       o       when idle, else a tenth of the time
//! ```
//!
//! Background work (`others`) has a debt for the disk time that it took. The debt shrinks by the time that
//! the disk idles and by a [`SHARE`] of the time that foreground work (`first`) uses it; while a debt is
//! left, background work waits. So foreground work is delayed by at most a tenth and one background piece,
//! and background work progresses even if the disk is always busy.

use std::{
    fmt,
    time::{Duration, Instant},
};

/// Fraction of the disk's foreground time that background work may take.
pub const SHARE: f64 = 0.1;

/// Shortest wait of background work, after which it checks again whether the disk idles.
const LOOK: Duration = Duration::from_millis(1);

/// Foreground use of a disk, which takes precedence over background work.
pub trait ForegroundIo: Send + Sync + fmt::Debug {
    /// Returns the total time for which foreground work has used the disk until `now`.
    fn used(&self, now: Instant) -> Duration;

    /// Returns how long the disk takes for `bytes`; zero while that is unknown.
    fn takes(&self, bytes: usize) -> Duration;
}

/// Throttle of background work on one disk; the default has no debt.
#[derive(Debug, Clone, Default)]
pub struct BackgroundThrottle {
    debt: Duration,
    /// Time of the last call of `wait`, and the foreground time by then.
    seen: Option<(Instant, Duration)>,
}

impl BackgroundThrottle {
    /// Returns after how long to ask again; zero if the next piece may go.
    pub fn wait(&mut self, first: &dyn ForegroundIo, now: Instant) -> Duration {
        let used = first.used(now);
        let (then, before) = self.seen.replace((now, used)).unwrap_or((now, used));
        let passed = now.saturating_duration_since(then);
        let busy = used.saturating_sub(before).min(passed);
        self.debt = self.debt.saturating_sub(passed - busy + busy.mul_f64(SHARE));
        if self.debt.is_zero() { Duration::ZERO } else { self.debt.max(LOOK) }
    }

    /// Adds the debt of a piece of `bytes` that took `took`. The expected disk time counts where it is
    /// longer, because the system may write cached data only later.
    pub fn add_debt(&mut self, first: &dyn ForegroundIo, bytes: usize, took: Duration) {
        self.debt += took.max(first.takes(bytes));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Foreground work whose disk use a test sets.
    #[derive(Debug)]
    struct FakeForeground {
        used: Duration,
        byte: Duration,
    }

    impl ForegroundIo for FakeForeground {
        fn used(&self, _: Instant) -> Duration {
            self.used
        }

        fn takes(&self, bytes: usize) -> Duration {
            self.byte * u32::try_from(bytes).unwrap_or(u32::MAX)
        }
    }

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn who_owes_waits_for_ten_times_as_long_as_it_took_where_the_disk_is_busy() {
        let (mut foreground, mut background, began) =
            (FakeForeground { used: ms(0), byte: ms(0) }, BackgroundThrottle::default(), Instant::now());
        assert_eq!(background.wait(&foreground, began), ms(0));
        background.add_debt(&foreground, 1, ms(10));
        foreground.used = ms(40);
        assert_eq!(background.wait(&foreground, began + ms(40)), ms(6));
        foreground.used = ms(100);
        assert_eq!(background.wait(&foreground, began + ms(100)), ms(0));
        background.add_debt(&foreground, 1, ms(10));
        assert_eq!(background.wait(&foreground, began + ms(110)), ms(0), "it idles");
    }

    #[test]
    fn what_is_written_later_counts_as_what_the_disk_will_take_for_it() {
        let (foreground, mut background, now) =
            (FakeForeground { used: ms(0), byte: ms(2) }, BackgroundThrottle::default(), Instant::now());
        background.add_debt(&foreground, 10, ms(1));
        assert_eq!(background.wait(&foreground, now), ms(20));
        background.add_debt(&foreground, 10, ms(25));
        assert_eq!(background.wait(&foreground, now), ms(45));
    }

    proptest! {
        /// X-05: beside a busy foreground, background work takes at most a tenth and a piece, and progresses.
        #[test]
        fn a_sweep_is_held_up_by_a_tenth_and_one_piece(
            pieces in prop::collection::vec(1_u64..40, 1..60),
            idle_before in 0_u64..200,
            look_every in 1_u64..15,
        ) {
            let (mut foreground, mut background, began) = (FakeForeground { used: ms(0), byte: ms(0) }, BackgroundThrottle::default(), Instant::now());
            background.wait(&foreground, began);
            let start = began + ms(idle_before);
            let (mut left, mut now, mut taken) = (pieces.iter(), start, 0);
            loop {
                foreground.used = now - start;
                if background.wait(&foreground, now) > ms(0) {
                    now += ms(look_every);
                    continue;
                }
                let passed = (now - start).as_secs_f64() * 1e3;
                prop_assert!(taken as f64 <= passed * SHARE + 1e-6, "{taken} of {passed} ms before the next piece");
                let turns = pieces.len() - left.len();
                prop_assert!(passed <= taken as f64 / SHARE + (turns as u64 * look_every) as f64 + 1e-6);
                let Some(&took) = left.next() else { break };
                now += ms(took);
                foreground.used = now - start;
                background.add_debt(&foreground, 1, ms(took));
                taken += took;
            }
        }
    }
}
