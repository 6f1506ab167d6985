//! Workers that are killed, stop, fail, lie or attack: every pass ends, and the results of honest workers and
//! the executor are bitwise right. Only a watchdog uses the clock.

use std::{
    mem,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use shmproto::{
    board::WakeReason,
    fd_passing::{FromWorker, WorkerHello, connect},
};

use crate::worker::{
    BatchRequest, PassSpeed, TestWorker, WATCHDOG, WorkerFixture, WorkerThreads, bits, honest, request,
    resident, serve_jobs, until,
};

const MODEL: &str = "llama-tied";

/// A fixture with a cold adapter, requests on it, and their expected bits.
struct HostileWorkersFixture {
    house: WorkerFixture,
    requests: Vec<BatchRequest>,
    expected: Vec<u32>,
}

impl HostileWorkersFixture {
    fn new(seats: usize) -> Self {
        let house = WorkerFixture::new(MODEL, seats, PassSpeed::Slow);
        let adapters = ["rank16-all-linear", "rank4-attention"].map(|it| house.golden_adapter(MODEL, it));
        let requests: Vec<_> =
            (0..4).map(|at| request(at, 1 + 20 * at as usize, adapters.get(at as usize % 3))).collect();
        let expected = bits(&mut resident(MODEL, 1), &requests);
        Self { house, requests, expected }
    }

    fn run(&mut self) {
        let found = bits(&mut self.house.model, &self.requests);
        assert!(found == self.expected, "{:?}", self.house.stats());
    }

    /// Runs passes until `is_so`, but enough to use all present workers.
    fn run_until(&mut self, what: &str, mut is_so: impl FnMut(&WorkerFixture) -> bool) {
        let end = Instant::now() + WATCHDOG;
        for round in 0.. {
            self.run();
            if round >= 5 && is_so(&self.house) {
                return;
            }
            assert!(Instant::now() < end, "never: {what}; {:?}", self.house.stats());
        }
    }
}

fn slices(house: &WorkerFixture) -> u64 {
    house.stats().workers.iter().map(|worker| worker.slices).sum()
}

fn taken_back(house: &WorkerFixture) -> u64 {
    house.stats().workers.iter().map(|worker| worker.taken_back).sum()
}

/// Claims a slice and ends; its socket closes as that of a killed process.
pub(crate) fn dies_after_claim(socket: &Path, over: &AtomicBool) {
    serve_jobs(socket, over, |worker| match worker.consumer.claim(|_, _| true) {
        Some(claim) => {
            mem::forget(claim);
            false
        }
        None => true,
    });
}

/// Claims all slices, finishes none, and stays.
pub(crate) fn hoards(socket: &Path, over: &AtomicBool) {
    serve_jobs(socket, over, |worker| {
        while let Some(claim) = worker.consumer.claim(|_, _| true) {
            mem::forget(claim);
        }
        true
    });
}

pub(crate) fn fails_everything(socket: &Path, over: &AtomicBool) {
    serve_jobs(socket, over, |worker| {
        while let Some(claim) = worker.consumer.claim(|_, _| true) {
            claim.fail();
        }
        true
    });
}

/// Takes a worker slot, polls once, and leaves.
pub(crate) fn comes_and_goes(socket: &Path, over: &AtomicBool) {
    serve_jobs(socket, over, |worker| {
        worker.news();
        worker.serve();
        false
    });
}

#[test]
fn workers_that_die_with_a_slice_are_noticed_and_cost_no_bit() {
    let mut scene = HostileWorkersFixture::new(2);
    let mut staff = WorkerThreads::default();
    (0..2).for_each(|_| scene.house.hire(&mut staff, dies_after_claim));
    scene.house.until_seated(2);
    scene.run_until("twenty are lost", |house| house.stats().workers_lost >= 20);
    drop(staff);
    scene.house.until_seated(0);
    scene.run();
}

#[test]
fn a_worker_that_stops_with_a_slice_is_given_up_and_counts_for_nothing_when_it_goes_on() {
    let mut scene = HostileWorkersFixture::new(1);
    let (has_claimed, claimed) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel::<()>();
    let socket = scene.house.socket().to_owned();
    let stopped = thread::spawn(move || {
        let mut worker = TestWorker::sit(&socket).unwrap();
        let sums = vec![f32::NAN; worker.consumer.geometry().sums_elements];
        let end = Instant::now() + WATCHDOG;
        loop {
            assert!(Instant::now() < end, "there is nothing to claim");
            if worker.consumer.wait(Duration::ZERO) != WakeReason::Job {
                continue;
            }
            let Some(claim) = worker.consumer.claim(|_, _| true) else { continue };
            has_claimed.send(()).unwrap();
            // Like SIGSTOP: the worker is silent, and its socket stays open.
            goes_on.recv_timeout(WATCHDOG).unwrap();
            let elements = claim.slice().sums_elements as usize;
            let in_time = claim.done(&sums[..elements]);
            return (in_time, worker.consumer.wait(Duration::ZERO));
        }
    });
    scene.house.until_seated(1);
    scene.run_until("it claims a slice", |_| claimed.try_recv().is_ok());
    scene.run_until("it is given up", |house| house.workers.cores().is_empty());
    assert_eq!(scene.house.stats().workers_lost, 1);
    // Another worker has the worker slot now.
    let mut staff = WorkerThreads::default();
    scene.house.hire(&mut staff, honest);
    scene.house.until_seated(1);
    scene.run();
    go_on.send(()).unwrap();
    scene.run();
    assert_eq!(stopped.join().unwrap(), (false, WakeReason::Fenced));
    scene.run_until("the other computes", |house| slices(house) > 0);
}

#[test]
fn a_worker_that_claims_everything_and_finishes_nothing_is_given_up() {
    let mut scene = HostileWorkersFixture::new(2);
    let mut staff = WorkerThreads::default();
    scene.house.hire(&mut staff, hoards);
    scene.house.hire(&mut staff, honest);
    scene.house.until_seated(2);
    // The hoarder returns each time.
    scene.run_until("three are lost", |house| house.stats().workers_lost >= 3);
    scene.run_until("the honest one computes beside it", |house| slices(house) > 0);
    drop(staff);
    scene.house.until_seated(0);
    scene.run();
}

#[test]
fn a_worker_that_fails_every_slice_costs_no_bit_and_the_figures_tell() {
    let mut scene = HostileWorkersFixture::new(1);
    let mut staff = WorkerThreads::default();
    scene.house.hire(&mut staff, fails_everything);
    scene.house.until_seated(1);
    let before = scene.requests[0].adapter.as_ref().unwrap().tally().read();
    scene.run_until("slices are taken back from it", |house| taken_back(house) >= 20);
    let after = scene.requests[0].adapter.as_ref().unwrap().tally().read();
    assert_eq!((slices(&scene.house), after[1]), (0, before[1]), "it has computed nothing");
    assert!(after[2] > before[2], "the executor has");
}

#[test]
fn workers_that_come_and_go_all_the_time_cost_no_bit() {
    let mut scene = HostileWorkersFixture::new(3);
    let mut staff = WorkerThreads::default();
    (0..3).for_each(|_| scene.house.hire(&mut staff, comes_and_goes));
    scene.run_until("sixty have come and gone", |house| house.stats().workers_lost >= 60);
    drop(staff);
    scene.house.until_seated(0);
    let generations = scene.house.stats().workers_lost;
    let mut staff = WorkerThreads::default();
    (0..3).for_each(|_| scene.house.hire(&mut staff, honest));
    scene.house.until_seated(3);
    scene.run_until("who comes after them computes", |house| slices(house) > 0);
    assert_eq!(scene.house.stats().workers_lost, generations, "and stays");
}

#[test]
fn one_that_marks_slices_done_without_computing_harms_no_pass_after_it() {
    let mut scene = HostileWorkersFixture::new(1);
    let mut staff = WorkerThreads::default();
    // The executor trusts the sums, since workers belong to its own user. Wrong sums have no effect after the
    // pass.
    scene.house.hire(&mut staff, |socket, over| {
        serve_jobs(socket, over, |worker| {
            let sums = vec![f32::NAN; worker.consumer.geometry().sums_elements];
            while let Some(claim) = worker.consumer.claim(|_, _| true) {
                let elements = claim.slice().sums_elements as usize;
                claim.done(&sums[..elements]);
            }
            true
        });
    });
    scene.house.until_seated(1);
    let mut was_wrong = false;
    until(
        || {
            let found = bits(&mut scene.house.model, &scene.requests);
            was_wrong |= found.iter().any(|bits| f32::from_bits(*bits).is_nan());
            was_wrong
        },
        || "it gets nothing to do".to_owned(),
    );
    drop(staff);
    scene.house.until_seated(0);
    scene.run();
}

#[test]
fn one_that_scribbles_over_the_control_words_stops_no_pass() {
    static SCRIBBLED: AtomicU32 = AtomicU32::new(0);
    let mut scene = HostileWorkersFixture::new(3);
    let mut staff = WorkerThreads::default();
    scene.house.hire(&mut staff, honest);
    scene.house.until_seated(1);
    scene.house.hire(&mut staff, |socket, over| {
        let control = TestWorker::sit(socket).unwrap().control();
        let words = control.words();
        let mut state = 1u64;
        while !over.load(Ordering::Relaxed) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (at, word) = ((state >> 40) as usize % words.len(), (state >> 20) as u32);
            // Random words, or words of other writers with one bit changed.
            let word =
                if state & 4 == 0 { word } else { words[at].load(Ordering::Relaxed) ^ (1 << (word % 32)) };
            words[at].store(word, Ordering::Relaxed);
            SCRIBBLED.fetch_add(1, Ordering::Relaxed);
        }
    });
    until(|| SCRIBBLED.load(Ordering::Relaxed) > 100_000, || "it begins".to_owned());
    // Results are arbitrary here: an honest worker may compute slices that were never posted.
    let end = Instant::now() + Duration::from_secs(2);
    let mut runs = 0;
    while runs < 100 || Instant::now() < end {
        let found = bits(&mut scene.house.model, &scene.requests);
        assert_eq!(found.len(), scene.expected.len());
        runs += 1;
    }
    drop(staff);
    scene.house.until_seated(0);
    scene.run();
}

#[test]
fn callers_that_say_nothing_or_nonsense_keep_no_worker_out() {
    let mut scene = HostileWorkersFixture::new(1);
    let socket = scene.house.socket().to_owned();
    let silent: Vec<_> = (0..20).map(|_| connect(&socket).unwrap()).collect();
    let odd = connect(&socket).unwrap();
    odd.send(&FromWorker::Hello(WorkerHello { version: 99, ..WorkerHello::new(1, 1) }), &[]).unwrap();
    let hasty = connect(&socket).unwrap();
    hasty.send(&FromWorker::AdapterMapped(1), &[]).unwrap();
    let mut staff = WorkerThreads::default();
    scene.house.hire(&mut staff, honest);
    scene.house.until_seated(1);
    scene.run_until("it computes", |house| slices(house) > 0);
    // A worker that sends without pause is served among the others, not before them.
    let talks = Arc::new(AtomicBool::new(true));
    let talking = Arc::clone(&talks);
    let talker = thread::spawn(move || {
        let connection = connect(&socket).unwrap();
        while talking.load(Ordering::Relaxed) {
            if connection.send(&FromWorker::AdapterMapped(7), &[]).is_err() {
                return;
            }
        }
    });
    let adapter = scene.house.golden_adapter(MODEL, "patterns");
    let requests = [request(8, 30, Some(&adapter))];
    until(
        || {
            bits(&mut scene.house.model, &requests);
            adapter.tally().read()[1] > 0
        },
        || "the new adapter is offered to the worker".to_owned(),
    );
    talks.store(false, Ordering::Relaxed);
    talker.join().unwrap();
    drop(silent);
}

#[test]
fn workers_of_every_kind_at_once_cost_no_bit() {
    let mut scene = HostileWorkersFixture::new(6);
    let mut staff = WorkerThreads::default();
    for behaviour in [honest, honest, dies_after_claim, hoards, fails_everything, comes_and_goes] {
        scene.house.hire(&mut staff, behaviour);
    }
    scene.run_until("many are lost, and work is done", |house| {
        house.stats().workers_lost >= 40 && slices(house) > 0 && taken_back(house) > 0
    });
    drop(staff);
    scene.house.until_seated(0);
    scene.run();
}
