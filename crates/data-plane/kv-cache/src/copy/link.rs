//! Emulates a link of limited bandwidth: computes when each piece would have arrived.
//!
//! The schedule is absolute: a run of pieces arrives at `start + bytes so far / bandwidth`, rounded up to a
//! nanosecond once. Delays of the copying thread do not add up. A piece cannot start before it was submitted,
//! so idle time is lost, as on a wire.

use std::{num::NonZeroU64, time::Duration};

const NANOS_PER_SECOND: u128 = 1_000_000_000;

/// Bandwidth of a link in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BytesPerSecond(pub NonZeroU64);

impl BytesPerSecond {
    /// Returns the bytes per second.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

#[derive(Debug)]
pub(super) struct LinkSchedule {
    bandwidth: BytesPerSecond,
    /// Start of the current run of pieces.
    started: Duration,
    run_bytes: u128,
}

impl LinkSchedule {
    pub(super) fn new(bandwidth: BytesPerSecond) -> Self {
        Self { bandwidth, started: Duration::ZERO, run_bytes: 0 }
    }

    /// Sends a piece that was ready at `ready`; returns its arrival time.
    pub(super) fn send(&mut self, ready: Duration, bytes: usize) -> Duration {
        if ready > self.free_at() {
            self.started = ready;
            self.run_bytes = 0;
        }
        self.run_bytes = self.run_bytes.saturating_add(bytes as u128);
        self.free_at()
    }

    fn free_at(&self) -> Duration {
        let nanos =
            self.run_bytes.saturating_mul(NANOS_PER_SECOND).div_ceil(u128::from(self.bandwidth.get()));
        self.started.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn link(bytes_per_second: u64) -> LinkSchedule {
        LinkSchedule::new(BytesPerSecond(NonZeroU64::new(bytes_per_second).unwrap()))
    }

    #[test]
    fn idle_time_is_no_credit() {
        let mut link = link(1_000);
        assert_eq!(link.send(Duration::ZERO, 1_000), Duration::from_secs(1));
        // After nine idle seconds a burst still takes as long as its bytes.
        let burst = Duration::from_secs(10);
        assert_eq!(link.send(burst, 500), Duration::from_millis(10_500));
        assert_eq!(link.send(burst, 500), Duration::from_millis(11_000));
    }

    proptest! {
        #[test]
        fn a_run_takes_its_bytes_over_the_bandwidth_whatever_its_pieces(
            bandwidth in 1_u64..1 << 40,
            pieces in prop::collection::vec(0_usize..1 << 24, 1..50),
            ready_us in 0_u64..1 << 30,
        ) {
            let (mut link, ready) = (link(bandwidth), Duration::from_micros(ready_us));
            let arrivals: Vec<_> = pieces.iter().map(|&bytes| link.send(ready, bytes)).collect();
            prop_assert!(arrivals.is_sorted());
            let total: u128 = pieces.iter().map(|&bytes| bytes as u128).sum();
            let exact_ns = (total * 1_000_000_000).div_ceil(u128::from(bandwidth));
            prop_assert_eq!((*arrivals.last().unwrap() - ready).as_nanos(), exact_ns);
        }

        #[test]
        fn no_piece_arrives_sooner_than_its_own_time_after_it_was_handed_over(
            bandwidth in 1_u64..1 << 40,
            pieces in prop::collection::vec((0_u64..1 << 40, 0_usize..1 << 24), 1..50),
        ) {
            let mut link = link(bandwidth);
            for (ready_ns, bytes) in pieces {
                let ready = Duration::from_nanos(ready_ns);
                let own_ns = bytes as u128 * 1_000_000_000 / u128::from(bandwidth);
                let took = link.send(ready, bytes).checked_sub(ready);
                prop_assert!(took.is_some_and(|took| took.as_nanos() >= own_ns));
            }
        }
    }
}
