//! Bounds background requests, such as the lines of a batch, beside online requests.
//!
//! A background request may wait for hours, so it uses only capacity that online requests leave. Without
//! online requests, background requests have a share of the batch slots; the other slots stay free for the
//! next online requests. While online requests run, each further sequence would lengthen their steps, and
//! shortly after an online request the next one may come. Background requests then have only the slots that
//! the operator allows. If that is none, a single sequence runs after a minute without any, so that no batch
//! starves.

/// Time after the last online request in which its client may send the next one, in microseconds.
const QUIET_US: u64 = 2_000_000;
/// Time without a background sequence after which one runs beside online requests, in microseconds.
const STARVED_US: u64 = 60_000_000;

/// Batch slots that background requests may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackgroundCapacity {
    /// Number of background sequences beside online requests.
    pub beside: usize,
    /// Number of background sequences without online requests.
    pub alone: usize,
}

/// Counts of online and background sequences.
#[derive(Debug, Clone, Default)]
pub struct BackgroundLimit {
    /// Online sequences that wait or run.
    online: usize,
    /// Time when the last online sequence ended.
    online_until_us: Option<u64>,
    /// Background sequences that run.
    background: usize,
    /// Time when the last background sequence ended; at first the start of the clock.
    background_until_us: u64,
}

impl BackgroundLimit {
    /// Records that `sequences` of an online request wait or run from now on.
    pub fn begin_online(&mut self, sequences: usize) {
        self.online += sequences;
    }

    /// Records that `sequences` of an online request have ended.
    pub fn end_online(&mut self, sequences: usize, now_us: u64) {
        self.online = self.online.saturating_sub(sequences);
        self.online_until_us = Some(now_us);
    }

    /// Records that `sequences` of a background request go to an executor.
    pub fn send(&mut self, sequences: usize) {
        self.background += sequences;
    }

    /// Records that `sequences` of a background request have ended.
    pub fn end(&mut self, sequences: usize, now_us: u64) {
        self.background = self.background.saturating_sub(sequences);
        self.background_until_us = now_us;
    }

    /// Returns the number of background sequences that may run now.
    #[must_use]
    pub fn slots(&self, capacity: BackgroundCapacity, now_us: u64) -> usize {
        let is_quiet = self.online_until_us.is_none_or(|until_us| now_us >= until_us + QUIET_US);
        if self.online == 0 && is_quiet {
            return capacity.alone.max(1);
        }
        let is_starved = now_us >= self.background_until_us + STARVED_US;
        capacity.beside.max(usize::from(is_starved))
    }

    /// Whether a background request of `sequences` may go to an executor. A request that is larger than the
    /// limit goes alone.
    #[must_use]
    pub fn lets(&self, sequences: usize, capacity: BackgroundCapacity, now_us: u64) -> bool {
        let slots = self.slots(capacity, now_us);
        slots > 0 && (self.background == 0 || self.background + sequences <= slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: BackgroundCapacity = BackgroundCapacity { beside: 0, alone: 32 };

    #[test]
    fn background_requests_have_their_share_without_online_requests_and_none_beside_them() {
        let mut limit = BackgroundLimit::default();
        assert_eq!(limit.slots(CAPACITY, 0), 32);
        limit.begin_online(3);
        assert!(!limit.lets(1, CAPACITY, 0));
        limit.end_online(3, 1_000_000);
        assert_eq!(limit.slots(CAPACITY, 2_999_999), 0, "the client may send the next request");
        assert_eq!(limit.slots(CAPACITY, 3_000_000), 32);
        let none = BackgroundCapacity { beside: 0, alone: 0 };
        assert_eq!(limit.slots(none, 3_000_000), 1, "a batch always goes on");
        limit.begin_online(1);
        assert_eq!(limit.slots(BackgroundCapacity { beside: 2, ..CAPACITY }, 3_000_000), 2);
    }

    #[test]
    fn one_background_sequence_a_minute_runs_beside_online_requests_that_never_pause() {
        let mut limit = BackgroundLimit::default();
        limit.begin_online(1);
        assert_eq!(limit.slots(CAPACITY, 59_999_999), 0);
        assert!(limit.lets(4, CAPACITY, 60_000_000), "a request above the limit goes alone");
        limit.send(4);
        assert!(!limit.lets(1, CAPACITY, 90_000_000));
        assert_eq!(limit.slots(CAPACITY, 90_000_000), 1, "the running one may end");
        limit.end(4, 100_000_000);
        assert_eq!(limit.slots(CAPACITY, 159_999_999), 0);
        assert_eq!(limit.slots(CAPACITY, 160_000_000), 1);
    }
}
