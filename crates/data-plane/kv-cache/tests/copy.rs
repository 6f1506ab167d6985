//! The copy engine with its thread and the machine's clock.

use std::{
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use kv_cache::copy::{BytesPerSecond, CopyEnd, CopyEngine, CopyPriority, CopySource};
use scheduling::background_io::ForegroundIo;
use testkit::WATCHDOG;

struct PieceCopy<F> {
    left: usize,
    bytes: usize,
    copy: F,
}

impl<F: FnMut() + Send> CopySource for PieceCopy<F> {
    fn next_bytes(&self) -> Option<usize> {
        (self.left > 0).then_some(self.bytes)
    }

    fn copy_next(&mut self) {
        (self.copy)();
        self.left -= 1;
    }
}

fn load(left: usize, bytes: usize, copy: impl FnMut() + Send + 'static) -> Box<dyn CopySource> {
    Box::new(PieceCopy { left, bytes, copy })
}

/// An engine, and a channel for the ends of its jobs.
struct EndReports {
    sender: mpsc::Sender<(usize, CopyEnd)>,
    ends: mpsc::Receiver<(usize, CopyEnd)>,
}

impl EndReports {
    fn new() -> Self {
        let (sender, ends) = mpsc::channel();
        Self { sender, ends }
    }

    fn of(&self, job: usize) -> Box<dyn FnOnce(CopyEnd) + Send> {
        let sender = self.sender.clone();
        Box::new(move |end| sender.send((job, end)).expect("the test waits for it"))
    }

    fn next(&self) -> (usize, CopyEnd) {
        self.ends.recv_timeout(WATCHDOG).expect("no job ended in time")
    }
}

#[test]
fn every_job_of_many_threads_is_copied_whole_and_its_owner_is_told_once() {
    let (engine, ends) = (CopyEngine::start(None).unwrap(), EndReports::new());
    let copied = Arc::new(AtomicUsize::new(0));
    thread::scope(|scope| {
        for thread in 0..4 {
            let (engine, ends) = (&engine, (0..50).map(|job| ends.of(thread * 50 + job)).collect::<Vec<_>>());
            let copied = Arc::clone(&copied);
            scope.spawn(move || {
                for (job, done) in ends.into_iter().enumerate() {
                    let copied = Arc::clone(&copied);
                    let copy = move || _ = copied.fetch_add(1, Ordering::Relaxed);
                    engine.submit(CopyPriority::ALL[job % 3], load(3, 7, copy), done).unwrap();
                }
            });
        }
    });
    let mut told: Vec<_> = (0..200).map(|_| ends.next()).collect();
    told.sort_unstable_by_key(|&(job, _)| job);
    assert_eq!(told, (0..200).map(|job| (job, CopyEnd::Done)).collect::<Vec<_>>());
    assert_eq!(copied.load(Ordering::Relaxed), 600);
    assert_eq!(engine.stats().copied_bytes, 4_200);
    drop(engine);
    assert!(ends.ends.try_recv().is_err(), "somebody was told twice");
}

#[test]
fn a_cancellation_waits_for_the_piece_in_hand_and_no_longer() {
    let (engine, ends) = (CopyEngine::start(None).unwrap(), EndReports::new());
    let (began, wait_began) = mpsc::channel();
    let (release, wait_release) = mpsc::channel::<()>();
    let copying = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&copying);
    let copy = move || {
        flag.store(true, Ordering::SeqCst);
        began.send(()).unwrap();
        wait_release.recv_timeout(WATCHDOG).unwrap();
        flag.store(false, Ordering::SeqCst);
    };
    let ticket = engine.submit(CopyPriority::Demand, load(1_000, 1, copy), ends.of(0)).unwrap();
    wait_began.recv_timeout(WATCHDOG).unwrap();
    let held = Arc::clone(&copying);
    let (cancelled, wait_cancelled) = mpsc::channel();
    thread::spawn(move || {
        ticket.cancel();
        cancelled.send((ticket.is_done(), held.load(Ordering::SeqCst))).unwrap();
    });
    thread::sleep(Duration::from_millis(20));
    assert!(wait_cancelled.try_recv().is_err(), "the cancellation returned while the piece was being copied");
    release.send(()).unwrap();
    assert_eq!(wait_cancelled.recv_timeout(WATCHDOG).unwrap(), (true, false));
    assert_eq!(ends.next(), (0, CopyEnd::Cancelled));
    assert_eq!(engine.stats().copied_bytes, 1);
}

#[test]
fn cancelling_from_many_threads_at_any_moment_leaves_nothing_behind() {
    let (engine, ends) = (CopyEngine::start(None).unwrap(), EndReports::new());
    for round in 0..300 {
        let gone = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&gone);
        let copy = move || assert!(!seen.load(Ordering::SeqCst), "a piece came after the cancellation");
        let ticket = engine.submit(CopyPriority::Preload, load(20, 1, copy), ends.of(round)).unwrap();
        let cancels: Vec<_> = (0..2)
            .map(|_| {
                let (ticket, gone) = (ticket.clone(), Arc::clone(&gone));
                thread::spawn(move || {
                    ticket.cancel();
                    gone.store(true, Ordering::SeqCst);
                    assert!(ticket.is_done());
                })
            })
            .collect();
        cancels.into_iter().for_each(|cancel| cancel.join().unwrap());
        let (job, end) = ends.next();
        assert_eq!(job, round);
        assert_ne!(end, CopyEnd::Failed);
    }
    assert_eq!(engine.stats().queued, [0; 3]);
}

#[test]
fn a_load_that_panics_fails_alone() {
    let (engine, ends) = (CopyEngine::start(None).unwrap(), EndReports::new());
    let faulty = load(2, 1, || panic!("a fault on purpose"));
    engine.submit(CopyPriority::Demand, faulty, ends.of(0)).unwrap();
    let sound = load(2, 1, || {});
    engine.submit(CopyPriority::Demand, sound, Box::new(|_| panic!("another fault on purpose"))).unwrap();
    engine.submit(CopyPriority::Demand, load(2, 1, || {}), ends.of(1)).unwrap();
    assert_eq!([ends.next(), ends.next()], [(0, CopyEnd::Failed), (1, CopyEnd::Done)]);
    let stats = engine.stats();
    assert_eq!((stats.done, stats.failed, stats.copied_bytes), (2, 1, 4));
}

#[test]
fn dropping_the_engine_cancels_the_rest_even_on_a_link_that_takes_years() {
    let slow = BytesPerSecond(NonZeroU64::MIN);
    let (engine, ends) = (CopyEngine::start(Some(slow)).unwrap(), EndReports::new());
    let bytes = 1 << 40;
    for job in 0..3 {
        engine
            .submit(CopyPriority::Demand, load(1, bytes, || panic!("it never arrives")), ends.of(job))
            .unwrap();
    }
    drop(engine);
    let mut told = [ends.next(), ends.next(), ends.next()];
    told.sort_unstable_by_key(|&(job, _)| job);
    assert_eq!(told, [0, 1, 2].map(|job| (job, CopyEnd::Cancelled)));
}

#[test]
fn the_last_handle_may_be_dropped_by_a_callback() {
    let (engine, ends) = (Arc::new(CopyEngine::start(None).unwrap()), EndReports::new());
    let (last, told) = (Arc::clone(&engine), ends.of(0));
    let (release, wait_release) = mpsc::channel::<()>();
    let waits = load(1, 1, move || wait_release.recv_timeout(WATCHDOG).unwrap());
    let done = move |end| {
        drop(last);
        told(end);
    };
    engine.submit(CopyPriority::Demand, waits, Box::new(done)).unwrap();
    drop(engine);
    release.send(()).unwrap();
    assert_eq!(ends.next(), (0, CopyEnd::Done));
}

#[test]
fn on_the_machines_clock_nothing_arrives_before_its_time() {
    // 1 MB/s: ten pieces of 1,000 bytes take a millisecond each.
    let link = BytesPerSecond(NonZeroU64::new(1_000_000).unwrap());
    let (engine, ends) = (CopyEngine::start(Some(link)).unwrap(), EndReports::new());
    let (arrived, arrivals) = mpsc::channel();
    let began = Instant::now();
    let copy = move || arrived.send(began.elapsed()).unwrap();
    engine.submit(CopyPriority::Demand, load(10, 1_000, copy), ends.of(0)).unwrap();
    assert_eq!(ends.next(), (0, CopyEnd::Done));
    for (piece, at) in arrivals.iter().enumerate() {
        assert!(at >= Duration::from_millis(piece as u64 + 1), "piece {piece} came after {at:?}");
    }
    assert!(engine.stats().copy_us >= 10_000);
}

#[derive(Debug)]
struct AlwaysBusy(Instant);

impl ForegroundIo for AlwaysBusy {
    fn used(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.0)
    }

    fn takes(&self, _: usize) -> Duration {
        Duration::from_secs(3_600)
    }
}

#[test]
fn whoever_gives_way_is_overtaken_by_demands_and_holds_up_nobodys_end() {
    let (engine, ends) =
        (CopyEngine::start_behind(Arc::new(AlwaysBusy(Instant::now()))).unwrap(), EndReports::new());
    engine.submit(CopyPriority::Preload, load(1, 1, || {}), ends.of(0)).unwrap();
    assert_eq!(ends.next(), (0, CopyEnd::Done));
    engine
        .submit(
            CopyPriority::Preload,
            load(1, 1, || panic!("an hour is owed for each of the others")),
            ends.of(1),
        )
        .unwrap();
    let hastened = engine.submit(CopyPriority::SwapIn, load(1, 1, || {}), ends.of(2)).unwrap();
    engine.submit(CopyPriority::Demand, load(3, 1, || {}), ends.of(3)).unwrap();
    assert_eq!(ends.next(), (3, CopyEnd::Done));
    hastened.raise(CopyPriority::Demand);
    assert_eq!(ends.next(), (2, CopyEnd::Done));
    drop(engine);
    assert_eq!(ends.next(), (1, CopyEnd::Cancelled));
}
