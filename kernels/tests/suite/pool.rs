//! The thread pool under stress: many regions, more threads than cores, panics, and drops at any moment.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use kernels::ThreadPool;
use testkit::watched;

use crate::support::pool;

#[test]
fn what_a_region_writes_is_seen_by_the_next_and_by_the_caller() {
    watched(|| {
        for threads in [1, 2, 4] {
            let mut pool = pool(threads);
            // Relaxed, so that only the pool's own ordering carries the values from region to region.
            let cells: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
            for region in 0..500u64 {
                pool.run(64, |chunk| {
                    let neighbour = cells[(chunk + 1) % 64].load(Ordering::Relaxed);
                    assert!(neighbour == region || neighbour == region + 1, "chunk {chunk} saw {neighbour}");
                    cells[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    cells.iter().all(|cell| cell.load(Ordering::Relaxed) == region + 1),
                    "{threads} threads"
                );
            }
        }
    });
}

#[test]
fn regions_of_changing_sizes_run_every_chunk_once() {
    watched(|| {
        for threads in [1, 2, 4] {
            let mut pool = pool(threads);
            let (count, sum) = (AtomicUsize::new(0), AtomicU64::new(0));
            let (mut chunks, mut indices) = (0, 0);
            for region in 0..3000usize {
                let size = region * 7 % 40;
                pool.run(size, |chunk| {
                    count.fetch_add(1, Ordering::Relaxed);
                    sum.fetch_add(chunk as u64, Ordering::Relaxed);
                });
                chunks += size;
                indices += (size * size.saturating_sub(1) / 2) as u64;
                assert_eq!((count.load(Ordering::Relaxed), sum.load(Ordering::Relaxed)), (chunks, indices));
            }
        }
    });
}

#[test]
fn helpers_that_have_parked_come_back_for_the_next_region() {
    watched(|| {
        let mut pool = pool(4);
        for _ in 0..30 {
            // Longer than an idle helper spins.
            std::thread::sleep(Duration::from_millis(2));
            let ran = AtomicUsize::new(0);
            pool.run(16, |_| {
                std::thread::sleep(Duration::from_micros(50));
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.load(Ordering::Relaxed), 16);
        }
    });
}

#[test]
fn a_caller_that_waits_for_a_slow_chunk_is_woken() {
    watched(|| {
        let mut pool = pool(2);
        for slow in 0..20 {
            let ran = AtomicUsize::new(0);
            pool.run(4, |chunk| {
                if chunk == slow % 4 {
                    std::thread::sleep(Duration::from_millis(2));
                }
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.load(Ordering::Relaxed), 4);
        }
    });
}

#[test]
fn panics_reach_the_caller_each_time_and_every_other_chunk_still_runs() {
    watched(|| {
        for threads in [2, 4] {
            let mut pool = pool(threads);
            for region in 0..20 {
                let ran = AtomicUsize::new(0);
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(12, |chunk| {
                        ran.fetch_add(1, Ordering::Relaxed);
                        assert!((chunk + region) % 3 != 0, "this chunk panics on purpose");
                    });
                }));
                assert!(outcome.is_err(), "{threads} threads, region {region}");
                assert_eq!(ran.load(Ordering::Relaxed), 12, "{threads} threads, region {region}");
                pool.run(12, |_| {});
            }
        }
    });
}

#[test]
fn a_pool_may_be_dropped_new_busy_idle_or_parked() {
    watched(|| {
        for threads in [1, 2, 4] {
            for pause_us in [0, 50, 290, 310, 1000] {
                for regions in [0, 1, 3] {
                    let mut pool = pool(threads);
                    for _ in 0..regions {
                        pool.run(8, |_| {});
                    }
                    std::thread::sleep(Duration::from_micros(pause_us));
                    drop(pool);
                }
            }
        }
    });
}

#[test]
fn pools_side_by_side_do_not_disturb_each_other() {
    watched(|| {
        let workers: Vec<_> = (0..3)
            .map(|worker| {
                std::thread::spawn(move || {
                    let mut pool = pool(2);
                    for _ in 0..300 {
                        let ran = AtomicUsize::new(0);
                        pool.run(worker + 2, |_| {
                            ran.fetch_add(1, Ordering::Relaxed);
                        });
                        assert_eq!(ran.load(Ordering::Relaxed), worker + 2);
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().expect("a worker's pool");
        }
    });
}

#[test]
fn cores_that_do_not_exist_cost_no_chunk() {
    watched(|| {
        let mut pool = ThreadPool::new(&[5000, 1023, usize::MAX]).expect("threads wherever there is room");
        let ran = AtomicUsize::new(0);
        pool.run(100, |_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!((pool.threads(), ran.load(Ordering::Relaxed)), (3, 100));
    });
}
