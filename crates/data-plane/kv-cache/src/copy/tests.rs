//! Tests of the copy worker, step by step, on a fake clock.

mod sorted_list;

use std::{
    collections::BTreeMap,
    fmt,
    num::NonZeroU64,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use scheduling::{background_io::ForegroundIo, clock::Clock};

use super::{
    BytesPerSecond, CopyEnd, CopyPriority, CopySource, SubmitError, Ticket,
    worker::{CopyShared, CopyWorker, WorkerStep},
};

/// Clock on which only waiting takes time. The `planned` event happens in the middle of the next wait.
#[derive(Clone)]
struct FakeClock(Arc<Mutex<FakeTime>>);

struct FakeTime {
    began: Instant,
    now: Instant,
    planned: Option<Box<dyn FnOnce() + Send>>,
}

impl FakeClock {
    fn new() -> Self {
        let began = Instant::now();
        Self(Arc::new(Mutex::new(FakeTime { began, now: began, planned: None })))
    }

    fn passed(&self) -> Duration {
        let time = self.0.lock().unwrap();
        time.now - time.began
    }

    fn advance(&self, by: Duration) {
        self.0.lock().unwrap().now += by;
    }

    fn plan(&self, event: impl FnOnce() + Send + 'static) {
        self.0.lock().unwrap().planned = Some(Box::new(event));
    }

    /// Runs the planned event now, unless it has happened.
    fn happen(&self) {
        let planned = self.0.lock().unwrap().planned.take();
        if let Some(event) = planned {
            event();
        }
    }
}

impl fmt::Debug for FakeClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FakeClock")
    }
}

impl Clock for FakeClock {
    fn now(&self) -> Instant {
        self.0.lock().unwrap().now
    }

    fn sleep_until(&self, at: Instant) {
        self.happen();
        let mut time = self.0.lock().unwrap();
        time.now = time.now.max(at);
    }
}

/// Log of copied pieces with their times, and of the jobs' ends.
#[derive(Debug, Default)]
struct Journal {
    pieces: Vec<(usize, usize, Duration)>,
    ends: BTreeMap<usize, Vec<CopyEnd>>,
    dropped: Vec<usize>,
}

struct JournaledCopy {
    name: usize,
    sizes: Vec<usize>,
    copied: usize,
    journal: Arc<Mutex<Journal>>,
    clock: FakeClock,
}

impl CopySource for JournaledCopy {
    fn next_bytes(&self) -> Option<usize> {
        self.sizes.get(self.copied).copied()
    }

    fn copy_next(&mut self) {
        assert!(self.next_bytes().is_some(), "there is nothing left to copy");
        self.journal.lock().unwrap().pieces.push((self.name, self.copied, self.clock.passed()));
        self.copied += 1;
    }
}

impl Drop for JournaledCopy {
    fn drop(&mut self) {
        self.journal.lock().unwrap().dropped.push(self.name);
    }
}

/// Engine without its thread: the test calls the steps.
struct CopyHarness {
    shared: Arc<CopyShared>,
    courier: CopyWorker,
    clock: FakeClock,
    journal: Arc<Mutex<Journal>>,
}

impl CopyHarness {
    fn new(bytes_per_second: Option<u64>, max_jobs: usize) -> Self {
        let clock = FakeClock::new();
        let shared = Arc::new(CopyShared::new(max_jobs, Box::new(clock.clone())));
        let bandwidth = bytes_per_second.and_then(NonZeroU64::new).map(BytesPerSecond);
        let courier = CopyWorker::new(Arc::clone(&shared), bandwidth);
        Self { shared, courier, clock, journal: Arc::default() }
    }

    fn submit(&self, name: usize, class: CopyPriority, sizes: &[usize]) -> Result<Ticket, SubmitError> {
        let (journal, clock) = (Arc::clone(&self.journal), self.clock.clone());
        let load = JournaledCopy { name, sizes: sizes.to_vec(), copied: 0, journal, clock };
        let journal = Arc::clone(&self.journal);
        let done = move |end| {
            let mut journal = journal.lock().unwrap();
            assert!(journal.dropped.contains(&name), "an owner is told after its load is gone");
            journal.ends.entry(name).or_default().push(end);
        };
        self.shared.submit(class, Box::new(load), Box::new(done))
    }

    fn run_dry(&mut self) -> WorkerStep {
        loop {
            let step = self.courier.step();
            if step != WorkerStep::Worked {
                return step;
            }
        }
    }

    fn end_of(&self, name: usize) -> Option<CopyEnd> {
        let journal = self.journal.lock().unwrap();
        journal.ends.get(&name).map(|ends| match ends[..] {
            [end] => end,
            _ => panic!("job {name} was ended {} times", ends.len()),
        })
    }

    fn pieces(&self) -> Vec<(usize, usize)> {
        self.journal.lock().unwrap().pieces.iter().map(|&(name, piece, _)| (name, piece)).collect()
    }
}

#[test]
fn a_demand_overtakes_at_the_next_piece() {
    let mut stage = CopyHarness::new(None, 8);
    stage.submit(0, CopyPriority::Preload, &[1, 1, 1]).unwrap();
    stage.courier.step();
    stage.submit(1, CopyPriority::Demand, &[1, 1]).unwrap();
    stage.run_dry();
    assert_eq!(stage.pieces(), [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2)]);
}

/// Foreground reader that uses the disk until a fixed time; each byte takes a millisecond.
#[derive(Debug)]
struct BusyDisk {
    clock: FakeClock,
    until: Duration,
}

impl ForegroundIo for BusyDisk {
    fn used(&self, now: Instant) -> Duration {
        (now - self.clock.0.lock().unwrap().began).min(self.until)
    }

    fn takes(&self, bytes: usize) -> Duration {
        Duration::from_millis(bytes as u64)
    }
}

/// copies beside a sweep that reads weights from the same disk.
#[test]
fn what_nobody_waits_for_gives_way_to_whoever_comes_first_and_a_demand_does_not() {
    let millis = Duration::from_millis;
    let mut stage = CopyHarness::new(None, 8);
    let busy = BusyDisk { clock: stage.clock.clone(), until: millis(100) };
    stage.courier = CopyWorker::new(Arc::clone(&stage.shared), None).behind(Arc::new(busy));
    stage.submit(0, CopyPriority::Preload, &[10, 10, 10]).unwrap();
    let hastened = stage.submit(1, CopyPriority::SwapIn, &[10]).unwrap();
    assert_eq!(stage.run_dry(), WorkerStep::GaveWay(millis(10)));
    assert_eq!(stage.pieces(), [(1, 0)], "one piece, and then ten times as long nothing");
    stage.submit(2, CopyPriority::Demand, &[5]).unwrap();
    assert_eq!(stage.run_dry(), WorkerStep::GaveWay(millis(15)), "which is not held up, and owed for");
    stage.clock.advance(millis(100));
    assert_eq!(stage.run_dry(), WorkerStep::GaveWay(millis(5)));
    stage.clock.advance(millis(5));
    assert_eq!(stage.run_dry(), WorkerStep::GaveWay(millis(10)), "the disk idled for those 5 ms");
    assert_eq!(stage.pieces(), [(1, 0), (2, 0), (0, 0)]);
    let waits = stage.submit(3, CopyPriority::Preload, &[1]).unwrap();
    waits.raise(CopyPriority::Demand);
    assert_eq!(stage.run_dry(), WorkerStep::GaveWay(millis(11)));
    assert!(waits.is_done() && hastened.is_done(), "whoever is hastened gives way no more");
    for _ in 0..2 {
        stage.clock.advance(millis(11));
        stage.run_dry();
    }
    assert_eq!((stage.end_of(0), stage.run_dry()), (Some(CopyEnd::Done), WorkerStep::Idle));
}

#[test]
fn a_piece_is_seen_when_its_time_on_the_link_is_over_and_a_demand_meanwhile_comes_next() {
    let mut stage = CopyHarness::new(Some(1_000), 8);
    stage.submit(0, CopyPriority::SwapIn, &[500, 500]).unwrap();
    let (shared, journal, clock) =
        (Arc::clone(&stage.shared), Arc::clone(&stage.journal), stage.clock.clone());
    stage.clock.plan(move || {
        assert!(journal.lock().unwrap().pieces.is_empty(), "the first piece is still on the link");
        let load = JournaledCopy { name: 1, sizes: vec![250], copied: 0, journal, clock };
        shared.submit(CopyPriority::Demand, Box::new(load), Box::new(|_| {})).unwrap();
    });
    stage.run_dry();
    let millis = Duration::from_millis;
    let expected = [(0, 0, millis(500)), (1, 0, millis(750)), (0, 1, millis(1_250))];
    assert_eq!(stage.journal.lock().unwrap().pieces, expected);
}

#[test]
fn a_raised_job_goes_behind_those_of_its_new_class_and_is_never_lowered() {
    let mut stage = CopyHarness::new(None, 8);
    let raised = stage.submit(0, CopyPriority::Preload, &[1, 1]).unwrap();
    stage.submit(1, CopyPriority::Demand, &[1]).unwrap();
    stage.submit(2, CopyPriority::SwapIn, &[1]).unwrap();
    raised.raise(CopyPriority::Demand);
    raised.raise(CopyPriority::Preload);
    stage.run_dry();
    assert_eq!(stage.pieces(), [(1, 0), (0, 0), (0, 1), (2, 0)]);
}

#[test]
fn a_job_cancelled_on_the_link_is_gone_at_once_and_its_time_is_spent() {
    let mut stage = CopyHarness::new(Some(1_000), 8);
    let ticket = stage.submit(0, CopyPriority::Demand, &[1_000, 1_000]).unwrap();
    stage.submit(1, CopyPriority::Demand, &[1_000]).unwrap();
    let (journal, held) = (Arc::clone(&stage.journal), ticket.clone());
    stage.clock.plan(move || {
        held.cancel();
        assert_eq!(journal.lock().unwrap().dropped, [0], "nothing touches the load after the cancellation");
    });
    stage.run_dry();
    assert!(ticket.is_done());
    assert_eq!(stage.end_of(0), Some(CopyEnd::Cancelled));
    assert_eq!(stage.journal.lock().unwrap().pieces, [(1, 0, Duration::from_secs(2))]);
    assert_eq!(stage.shared.stats().copied_bytes, 1_000);
}

#[test]
fn a_full_queue_is_an_answer_and_an_ended_job_makes_room() {
    let mut stage = CopyHarness::new(None, 2);
    stage.submit(0, CopyPriority::Demand, &[1]).unwrap();
    stage.submit(1, CopyPriority::Demand, &[1]).unwrap();
    assert_eq!(stage.submit(2, CopyPriority::Demand, &[1]).unwrap_err(), SubmitError::Full { limit: 2 });
    assert_eq!(stage.journal.lock().unwrap().dropped, [2]);
    stage.run_dry();
    assert_eq!(stage.end_of(2), None);
    assert!(stage.submit(3, CopyPriority::Demand, &[1]).is_ok());
}

#[test]
fn a_load_of_nothing_is_done_and_nothing_is_copied() {
    let mut stage = CopyHarness::new(Some(1), 2);
    let ticket = stage.submit(0, CopyPriority::Preload, &[]).unwrap();
    assert!(!ticket.is_done());
    assert_eq!(stage.run_dry(), WorkerStep::Idle);
    assert_eq!((stage.end_of(0), stage.clock.passed()), (Some(CopyEnd::Done), Duration::ZERO));
}

#[test]
fn a_closed_engine_cancels_what_is_left_and_tells_every_owner() {
    let mut stage = CopyHarness::new(Some(1_000), 8);
    stage.submit(0, CopyPriority::Demand, &[10, 10]).unwrap();
    stage.submit(1, CopyPriority::Preload, &[10]).unwrap();
    stage.courier.step();
    // The engine closes in the middle of a piece, which is then not awaited.
    let shared = Arc::clone(&stage.shared);
    stage.clock.plan(move || shared.close());
    assert_eq!(stage.run_dry(), WorkerStep::Closed);
    assert_eq!((stage.end_of(0), stage.end_of(1)), (Some(CopyEnd::Cancelled), Some(CopyEnd::Cancelled)));
    assert_eq!(stage.pieces(), [(0, 0)]);
}

#[test]
fn a_burst_after_idling_takes_as_long_as_its_bytes() {
    let mut stage = CopyHarness::new(Some(1_000), 8);
    stage.submit(0, CopyPriority::Demand, &[1_000]).unwrap();
    stage.run_dry();
    stage.clock.advance(Duration::from_secs(9));
    stage.submit(1, CopyPriority::Demand, &[1_000]).unwrap();
    stage.submit(2, CopyPriority::Demand, &[1_000]).unwrap();
    stage.run_dry();
    let at: Vec<_> = stage.journal.lock().unwrap().pieces.iter().map(|piece| piece.2.as_secs()).collect();
    assert_eq!(at, [1, 11, 12]);
    assert_eq!(stage.shared.stats().copy_us, 3_000_000);
}

fn class() -> impl Strategy<Value = CopyPriority> {
    prop::sample::select(CopyPriority::ALL.to_vec())
}

proptest! {
    #[test]
    fn every_piece_of_a_busy_link_is_seen_at_its_bytes_over_the_bandwidth_to_the_nanosecond(
        bandwidth in 1_u64..1 << 36,
        loads in prop::collection::vec((class(), prop::collection::vec(0_usize..1 << 20, 0..8)), 1..12),
    ) {
        let mut stage = CopyHarness::new(Some(bandwidth), loads.len());
        for (name, (class, sizes)) in loads.iter().enumerate() {
            stage.submit(name, *class, sizes).unwrap();
        }
        stage.run_dry();
        let mut sum = 0_u128;
        for &(name, piece, at) in &stage.journal.lock().unwrap().pieces {
            sum += loads[name].1[piece] as u128;
            prop_assert_eq!(at.as_nanos(), (sum * 1_000_000_000).div_ceil(u128::from(bandwidth)));
        }
        prop_assert_eq!(u128::from(stage.shared.stats().copied_bytes), sum);
        prop_assert_eq!(u128::from(stage.shared.stats().copy_us), stage.clock.passed().as_micros());
    }
}
