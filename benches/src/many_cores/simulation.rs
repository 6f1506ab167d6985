//! Threads that claim chunks of regions, on a virtual clock.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use kernels::{ThreadPool, pool::ParallelRegion};

use super::costs::PoolCosts;

/// Seconds of a pass of these regions on `threads` threads.
///
/// The claim word and the report word belong to one thread at a time: each claim and each report occupies its
/// word for `costs.claim`. Helpers sleep before the first region and spin between the others.
pub(super) fn seconds(regions: &[ParallelRegion], threads: usize, costs: &PoolCosts) -> f64 {
    let mut is_first = true;
    let took = |region: &ParallelRegion| {
        let arrival = if region.chunks.len() > 1 && std::mem::take(&mut is_first) {
            ThreadArrival::Woken
        } else {
            ThreadArrival::LookingOut
        };
        region.before + parallel(&region.chunks, threads, arrival, costs)
    };
    regions.iter().map(took).sum::<Duration>().as_secs_f64()
}

#[derive(Clone, Copy)]
enum ThreadArrival {
    Woken,
    LookingOut,
}

impl ThreadArrival {
    /// Time until helper number `helper`, from 1, sees that a region is open.
    fn of(self, helper: usize, costs: &PoolCosts) -> Duration {
        match self {
            // The helpers get the doorbell's cache line one after another.
            Self::LookingOut => costs.arrival + costs.claim * (helper as u32 - 1),
            // The caller wakes the first helpers, one call after another; then each wakes as many.
            Self::Woken => {
                let (waker, turn) =
                    ((helper - 1) / ThreadPool::WOKEN_AT_ONCE, (helper - 1) % ThreadPool::WOKEN_AT_ONCE);
                let woken = costs.wake_call * (turn as u32 + 1) + costs.waking;
                if waker == 0 { woken } else { self.of(waker, costs) + woken }
            }
        }
    }
}

fn parallel(chunks: &[Duration], threads: usize, arrival: ThreadArrival, costs: &PoolCosts) -> Duration {
    if chunks.len() <= 1 || threads == 1 {
        return chunks.iter().sum();
    }
    let mut left = chunks.iter();
    let (mut claims, mut reports, mut end) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    let helpers = (1..threads).map(|helper| arrival.of(helper, costs));
    let caller = match arrival {
        ThreadArrival::Woken => costs.wake_call * (threads - 1).min(ThreadPool::WOKEN_AT_ONCE) as u32,
        ThreadArrival::LookingOut => Duration::ZERO,
    };
    // Time at which each thread claims next, and whether it has chunks to report.
    let mut coming: BinaryHeap<_> =
        std::iter::once(caller).chain(helpers).map(|at| Reverse((at, false))).collect();
    while let Some(Reverse((at, has_chunks))) = coming.pop() {
        match left.next() {
            Some(chunk) => {
                claims = at.max(claims) + costs.claim;
                coming.push(Reverse((claims + *chunk, true)));
            }
            None if has_chunks => {
                reports = at.max(reports) + costs.claim;
                end = end.max(reports);
            }
            None => {}
        }
    }
    // The caller checks once more.
    end + costs.claim
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn region(chunks: usize) -> ParallelRegion {
        ParallelRegion { before: MS, chunks: vec![MS; chunks] }
    }

    #[test]
    fn free_claims_leave_serial_parts_and_the_last_round_of_chunks() {
        let took = |threads, chunks| seconds(&[region(chunks)], threads, &PoolCosts::NONE);
        assert_eq!(took(1, 8), 0.009);
        assert_eq!(took(4, 8), 0.003);
        assert_eq!(took(64, 8), 0.002);
        assert_eq!(took(3, 8), 0.004);
    }

    #[test]
    fn claims_follow_each_other_however_many_threads_there_are() {
        let costs = PoolCosts { claim: MS, ..PoolCosts::NONE };
        // Eight claims, the last chunk, its report, and the caller's check.
        assert_eq!(seconds(&[region(8)], 64, &costs), 0.001 + 0.011);
        assert_eq!(seconds(&[region(8)], 1, &costs), 0.009);
    }

    #[test]
    fn helpers_are_woken_once_and_by_each_other() {
        let costs = PoolCosts { waking: 10 * MS, wake_call: MS, ..PoolCosts::NONE };
        let wakers = ThreadPool::WOKEN_AT_ONCE;
        assert_eq!(ThreadArrival::Woken.of(1, &costs), 11 * MS);
        assert_eq!(ThreadArrival::Woken.of(2, &costs), 12 * MS);
        assert_eq!(ThreadArrival::Woken.of(wakers + 1, &costs), 22 * MS);
        // The caller wakes seven helpers and computes four chunks alone until the first arrives: 13 ms. In
        // the next region all are there.
        assert_eq!(seconds(&[region(8), region(8)], 8, &costs), 0.014 + 0.002);
    }
}
