//! Progress that never goes backwards, whatever it is told.
//!
//! A bar that jumps back is a bar nobody believes. Downloads restart, totals turn out larger than announced, a resumed
//! file counts from what is there: what is shown is the largest share that was ever true, and all of it only at the end.

use indicatif::{ProgressBar, ProgressStyle};

/// The bar counts thousandths: a total that changes must not change the scale.
const WHOLE: u64 = 1000;

/// How far something is.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    shown: u64,
}

impl Progress {
    /// Progress that nobody sees.
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), shown: 0 }
    }

    /// A bar on stderr.
    pub(crate) fn drawn(message: String) -> Self {
        let bar = ProgressBar::new(WHOLE).with_message(message);
        if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {percent:>3}%") {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, shown: 0 }
    }

    /// `done` of `total` is done. Anything that would go backwards changes nothing.
    pub(crate) fn at(&mut self, done: u64, total: u64) {
        self.shown = self.shown.max(thousandths(done, total));
        self.bar.set_position(self.shown);
    }

    /// What is shown, in thousandths.
    #[cfg(test)]
    pub(crate) fn shown(&self) -> u64 {
        self.shown
    }

    /// All is done; the line stays.
    pub(crate) fn finish(&mut self) {
        self.at(1, 1);
        self.bar.finish();
    }
}

/// Rounded down, so that all of it is shown for all of it alone; an unknown total shows nothing.
fn thousandths(done: u64, total: u64) -> u64 {
    if total == 0 {
        return 0;
    }
    let share = u128::from(done.min(total)) * u128::from(WHOLE) / u128::from(total);
    u64::try_from(share).unwrap_or(WHOLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn progress_never_goes_backwards(
            updates in prop::collection::vec((any::<u64>(), any::<u64>()), 1..100),
            small in prop::collection::vec((0_u64..50, 0_u64..50), 1..100),
        ) {
            let mut progress = Progress::hidden();
            for (done, total) in updates.into_iter().chain(small) {
                let before = progress.shown();
                progress.at(done, total);
                prop_assert!(progress.shown() >= before && progress.shown() <= WHOLE);
            }
        }

        #[test]
        fn all_is_shown_only_when_all_is_done(done in any::<u64>(), total in 1_u64..) {
            let mut progress = Progress::hidden();
            progress.at(done, total);
            prop_assert_eq!(progress.shown() == WHOLE, done >= total);
        }
    }

    #[test]
    fn a_resumed_pull_starts_where_it_is_and_a_restarted_one_stays_there() {
        let mut progress = Progress::hidden();
        progress.at(600, 1000);
        assert_eq!(progress.shown(), 600);
        progress.at(0, 1000);
        assert_eq!(progress.shown(), 600, "a server without ranges starts over; the bar waits");
        progress.at(700, 1000);
        assert_eq!(progress.shown(), 700);
        progress.finish();
        assert_eq!(progress.shown(), WHOLE);
    }
}
