//! Progress bar that never goes backwards, because users do not trust a bar that does.
//!
//! Downloads restart, totals grow, and a resumed file starts at its present size. The bar shows the largest
//! fraction so far, and the full bar only at the end. Beside the bar stand the bytes, and the speed since the
//! bar was drawn.

use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};

/// Length of the bar in thousandths, so that a new total does not change the scale.
const WHOLE: u64 = 1000;

#[derive(Debug)]
pub(crate) struct MonotonicProgress {
    bar: ProgressBar,
    shown: u64,
    begin: Option<ProgressStart>,
}

/// Time and bytes of the first update, from which the speed is computed.
#[derive(Debug, Clone, Copy)]
struct ProgressStart {
    at: Instant,
    done_bytes: u64,
}

impl MonotonicProgress {
    /// Returns progress that is not drawn.
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), shown: 0, begin: None }
    }

    /// Returns a bar on stderr.
    pub(crate) fn drawn(message: String) -> Self {
        let bar = ProgressBar::new(WHOLE).with_message(message);
        if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {percent:>3}%  {prefix}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, shown: 0, begin: None }
    }

    /// Sets the progress to `done_bytes` of `total_bytes`. The bar does not move backwards.
    pub(crate) fn at(&mut self, done_bytes: u64, total_bytes: u64) {
        let begin = *self.begin.get_or_insert_with(|| ProgressStart { at: Instant::now(), done_bytes });
        let came = done_bytes.saturating_sub(begin.done_bytes);
        self.bar.set_prefix(in_words(done_bytes, total_bytes, came, begin.at.elapsed()));
        self.draw(thousandths(done_bytes, total_bytes));
    }

    /// Sets the progress to `done` of `total` steps, with `words` beside the bar.
    pub(crate) fn at_step(&mut self, done: u64, total: u64, words: String) {
        self.bar.set_prefix(words);
        self.draw(thousandths(done, total));
    }

    /// Stops the bar at its current position and keeps the line.
    pub(crate) fn abandon(&self) {
        self.bar.abandon();
    }

    fn draw(&mut self, thousandths: u64) {
        self.shown = self.shown.max(thousandths);
        self.bar.set_position(self.shown);
    }

    /// Returns the shown position in thousandths.
    #[cfg(test)]
    pub(crate) fn shown(&self) -> u64 {
        self.shown
    }

    /// Moves the bar to its end and keeps the line.
    pub(crate) fn finish(&mut self) {
        self.draw(WHOLE);
        self.bar.finish();
    }
}

/// Formats the bytes done, the total and the speed; `came` bytes arrived within `within`.
fn in_words(done_bytes: u64, total_bytes: u64, came: u64, within: Duration) -> String {
    let amount = format!("{} of {}", BinaryBytes(done_bytes), BinaryBytes(total_bytes));
    match u64::try_from(u128::from(came) * 1000 / within.as_millis().max(1)) {
        // The time is too short for a meaningful speed.
        _ if within < Duration::from_millis(100) => amount,
        Ok(per_s) => format!("{amount}, {}/s", BinaryBytes(per_s)),
        Err(_) => amount,
    }
}

/// Returns the fraction in thousandths, rounded down so that only a complete transfer shows 1000; 0 if
/// `total` is 0.
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
            let mut progress = MonotonicProgress::hidden();
            for (done, total) in updates.into_iter().chain(small) {
                let before = progress.shown();
                progress.at(done, total);
                prop_assert!(progress.shown() >= before && progress.shown() <= WHOLE);
            }
        }

        #[test]
        fn all_is_shown_only_when_all_is_done(done in any::<u64>(), total in 1_u64..) {
            let mut progress = MonotonicProgress::hidden();
            progress.at(done, total);
            prop_assert_eq!(progress.shown() == WHOLE, done >= total);
        }
    }

    #[test]
    fn bytes_and_speed_stand_beside_the_bar_and_what_was_here_before_is_not_speed() {
        let text = in_words(3 << 20, 4 << 20, 2 << 20, Duration::from_secs(4));
        assert_eq!(text, "3.00 MiB of 4.00 MiB, 512.00 KiB/s");
        assert_eq!(in_words(1, 2, 1, Duration::ZERO), "1 B of 2 B");
    }

    #[test]
    fn a_resumed_pull_starts_where_it_is_and_a_restarted_one_stays_there() {
        let mut progress = MonotonicProgress::hidden();
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
