//! What work that can wait may take of a disk beside somebody who comes first there.
//!
//! ```text
//! first     |#####|  |#######################|         |######|
//! others    o     o oo  o         o         o ooooooooo       o       whenever it idles, else a tenth of the time
//! ```
//!
//! The others are in debt for what they took of the disk. They pay with the time it idles, and with a [`SHARE`] of the time that it is in
//! use by whoever comes first; while they owe something they wait. So whoever comes first is held up by a tenth and one piece of
//! theirs at most, and they get on however long it keeps the disk busy.

use std::{
    fmt,
    time::{Duration, Instant},
};

/// Of the time that the disk is busy with what comes first, what others may take (CHECKLIST X-05).
pub const SHARE: f64 = 0.1;

/// How long at least somebody waits who waits: so often it is seen whether the disk idles.
const LOOK: Duration = Duration::from_millis(1);

/// Whoever comes first at a disk that others share.
pub trait ForegroundIo: Send + Sync + fmt::Debug {
    /// How long it has used the disk until `now`, altogether.
    fn used(&self, now: Instant) -> Duration;

    /// How long the disk takes for so many bytes; nothing while that is not known.
    fn takes(&self, bytes: usize) -> Duration;
}

/// See the module. The default owes nothing.
#[derive(Debug, Clone, Default)]
pub struct BackgroundThrottle {
    debt: Duration,
    /// When it was asked last, and how long the first had used the disk by then.
    seen: Option<(Instant, Duration)>,
}

impl BackgroundThrottle {
    /// After how long to ask again; nothing if a piece's turn has come.
    pub fn wait(&mut self, first: &dyn ForegroundIo, now: Instant) -> Duration {
        let used = first.used(now);
        let (then, before) = self.seen.replace((now, used)).unwrap_or((now, used));
        let passed = now.saturating_duration_since(then);
        let busy = used.saturating_sub(before).min(passed);
        self.debt = self.debt.saturating_sub(passed - busy + busy.mul_f64(SHARE));
        if self.debt.is_zero() { Duration::ZERO } else { self.debt.max(LOOK) }
    }

    /// A piece of so many bytes took so long. What the system has only taken note of the disk has still to do.
    pub fn add_debt(&mut self, first: &dyn ForegroundIo, bytes: usize, took: Duration) {
        self.debt += took.max(first.takes(bytes));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Somebody who uses the disk when a test says so.
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
        let (mut told, mut others, began) =
            (FakeForeground { used: ms(0), byte: ms(0) }, BackgroundThrottle::default(), Instant::now());
        assert_eq!(others.wait(&told, began), ms(0));
        others.add_debt(&told, 1, ms(10));
        told.used = ms(40);
        assert_eq!(others.wait(&told, began + ms(40)), ms(6));
        told.used = ms(100);
        assert_eq!(others.wait(&told, began + ms(100)), ms(0));
        others.add_debt(&told, 1, ms(10));
        assert_eq!(others.wait(&told, began + ms(110)), ms(0), "it idles");
    }

    #[test]
    fn what_is_written_later_counts_as_what_the_disk_will_take_for_it() {
        let (told, mut others, now) =
            (FakeForeground { used: ms(0), byte: ms(2) }, BackgroundThrottle::default(), Instant::now());
        others.add_debt(&told, 10, ms(1));
        assert_eq!(others.wait(&told, now), ms(20));
        others.add_debt(&told, 10, ms(25));
        assert_eq!(others.wait(&told, now), ms(45));
    }

    proptest! {
        /// X-05: of any time in which the disk is busy with what comes first, others take a tenth and a piece at most, and they
        /// come to their turns.
        #[test]
        fn a_sweep_is_held_up_by_a_tenth_and_one_piece(
            pieces in prop::collection::vec(1_u64..40, 1..60),
            idle_before in 0_u64..200,
            look_every in 1_u64..15,
        ) {
            let (mut told, mut others, began) = (FakeForeground { used: ms(0), byte: ms(0) }, BackgroundThrottle::default(), Instant::now());
            others.wait(&told, began);
            let start = began + ms(idle_before);
            let (mut left, mut now, mut taken) = (pieces.iter(), start, 0);
            loop {
                told.used = now - start;
                if others.wait(&told, now) > ms(0) {
                    now += ms(look_every);
                    continue;
                }
                let passed = (now - start).as_secs_f64() * 1e3;
                prop_assert!(taken as f64 <= passed * SHARE + 1e-6, "{taken} of {passed} ms before the next piece");
                let turns = pieces.len() - left.len();
                prop_assert!(passed <= taken as f64 / SHARE + (turns as u64 * look_every) as f64 + 1e-6);
                let Some(&took) = left.next() else { break };
                now += ms(took);
                told.used = now - start;
                others.add_debt(&told, 1, ms(took));
                taken += took;
            }
        }
    }
}
