//! The bridge between a device and its workers, without a device: a thread acts as the stream. The thread
//! writes rows into the slab, stores `asked`, waits for `answered`, and reads the sums, which must have the
//! bits of the single-threaded arithmetic.

mod group_request;
mod stream;

use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use base_executor::{
    adapter_images::{ImageRegistry, publish},
    workers::{WorkerListener, Workers, gpu_bridge::Bridge},
};
use kernels::{
    cuda::{CudaError, board::has_reached},
    lora::LoraPrecision,
};
use kv_cache::ledger::MemoryAccount;
use model::{
    deltas::{
        assist::{AssistJob, OwnedPartialSum},
        prepared::{EncodedAdapter, PreparedAdapter},
    },
    shape::{config::ModelConfig, source::Target},
    sources::open::open,
};
use shmproto::message::Stats;
use tempfile::TempDir;

use self::{
    group_request::{GROUPS, GroupRequest, ROWS},
    stream::{FakeStream, HostBridgeMemory, StreamOp},
};
use crate::{
    hostile_workers::{comes_and_goes, dies_after_claim, fails_everything, hoards},
    worker::{WATCHDOG, WorkerThreads, adapter_of_everything, golden, honest, until},
};

struct StreamBridgeFixture {
    // Field order matters: the engine drops its bridge before it waits for its stream.
    bridge: Option<Bridge<HostBridgeMemory>>,
    stream: FakeStream,
    words: HostBridgeMemory,
    workers: Workers,
    config: ModelConfig,
    adapters: Vec<Arc<PreparedAdapter>>,
    jobs: usize,
    rank_rows: u64,
    socket: PathBuf,
    _directory: TempDir,
}

impl StreamBridgeFixture {
    fn new(most: usize) -> Self {
        Self::beginning_at(most, 0)
    }

    /// Creates a fixture whose words start at `number`.
    fn beginning_at(most: usize, number: u32) -> Self {
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(private).tempdir().unwrap();
        let (socket, library) = (directory.path().join("workers.sock"), ImageRegistry::new().unwrap());
        let config = open(&golden("models").join("llama-tied")).unwrap().config().clone();
        let mut words = None;
        let wire = |slab, sums_elements| {
            Ok(words.insert(HostBridgeMemory::new(slab, sums_elements, number)).clone())
        };
        let memory = MemoryAccount::default();
        let listener = Some(WorkerListener { socket: &socket, most, memory: &memory });
        let (workers, bridge) =
            Workers::start_bridged(listener, ROWS, &config, library.clone(), &[0, 0], wire).unwrap();
        let adapter = |ranks: &[usize]| {
            let encoded =
                EncodedAdapter::new(&adapter_of_everything(&config, ranks), &config, LoraPrecision::Exact);
            publish(encoded, &config, &library).unwrap()
        };
        let adapters = [&[16][..], &[70, 3, 16], &[1, 40]].map(adapter).into();
        let words = words.unwrap();
        Self {
            bridge: Some(bridge),
            stream: FakeStream::new(words.clone()),
            words,
            workers,
            config,
            adapters,
            jobs: 0,
            rank_rows: 0,
            socket,
            _directory: directory,
        }
    }

    fn bridge(&mut self) -> &mut Bridge<HostBridgeMemory> {
        self.bridge.as_mut().unwrap()
    }

    fn question(&mut self, rows: usize) -> GroupRequest {
        self.jobs += 1;
        let question = GroupRequest::new(&self.config, &self.adapters, self.jobs, rows);
        self.rank_rows += question.rank_rows();
        question
    }

    /// Runs a pass of `jobs` jobs of up to `rows` rows; compares their sums, or returns that the pass failed.
    fn try_pass(&mut self, jobs: usize, rows: usize) -> Result<(), CudaError> {
        let questions: Vec<_> = (0..jobs).map(|_| self.question(rows)).collect();
        self.bridge().begin_pass();
        for question in &questions {
            let number = self.bridge().post(question.job());
            self.stream.enqueue(StreamOp::Ask { number, x: question.x.clone() });
            self.stream.enqueue(StreamOp::Add { number, elements: question.elements() });
        }
        let found = self.stream.synchronize();
        self.bridge().end_pass()?;
        assert_eq!(found.len(), questions.len());
        for (found, question) in found.iter().zip(&questions) {
            let bits = |sums: &[f32]| sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>();
            assert!(bits(found) == bits(&question.sums()), "job {}, {:?}", question.salt, self.stats());
        }
        Ok(())
    }

    fn pass(&mut self, jobs: usize, rows: usize) {
        assert_eq!(self.try_pass(jobs, rows), Ok(()), "{:?}", self.stats());
    }

    fn run_until(&mut self, what: &str, mut is_so: impl FnMut(&Stats) -> bool) {
        let end = Instant::now() + WATCHDOG;
        for round in 0.. {
            self.pass(4, 60);
            if round >= 5 && is_so(&self.stats()) {
                return;
            }
            assert!(Instant::now() < end, "never: {what}; {:?}", self.stats());
        }
    }

    fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        self.workers.stats(&mut stats);
        stats
    }

    fn until_seated(&self, count: usize) {
        until(|| self.workers.cores().len() == count, || format!("{count} workers: {:?}", self.stats()));
    }

    fn tally(&self) -> [u64; 3] {
        let tallies = self.adapters.iter().map(|adapter| adapter.tally().read());
        tallies.fold([0; 3], |[a, b, c], [x, y, z]| [a + x, b + y, c + z])
    }
}

impl Drop for StreamBridgeFixture {
    fn drop(&mut self) {
        self.bridge = None;
    }
}

#[test]
fn one_to_three_workers_sum_for_a_device_with_the_bits_of_one_thread() {
    for count in 1..=3 {
        let mut scene = StreamBridgeFixture::new(count);
        let mut staff = WorkerThreads::default();
        (0..count).for_each(|_| staff.hire(&scene.socket, honest));
        scene.until_seated(count);
        // A slow device gives the workers time.
        scene.stream.enqueue(StreamOp::Sleep(Duration::from_millis(2)));
        scene.run_until("workers compute", |stats| stats.workers.iter().any(|line| line.slices > 20));
        (0..20).for_each(|_| scene.pass(10, 256));
        let [device, workers, executor] = scene.tally();
        assert_eq!((device, workers + executor), (0, scene.rank_rows), "every rank of every row, once");
        let stats = scene.stats();
        assert_eq!(stats.workers.iter().map(|line| line.rank_rows).sum::<u64>(), workers, "{stats:?}");
        assert_eq!(stats.workers_lost, 0, "{stats:?}");
    }
}

#[test]
fn without_workers_the_executors_cores_sum_everything() {
    let mut scene = StreamBridgeFixture::new(1);
    (0..10).for_each(|_| scene.pass(10, 256));
    assert_eq!(scene.tally(), [0, 0, scene.rank_rows]);
    // The result is the same without a listener.
    let mut scene = StreamBridgeFixture::new(0);
    assert!(!scene.socket.exists(), "nobody is to come in");
    (0..10).for_each(|_| scene.pass(10, 256));
    assert_eq!(scene.tally(), [0, 0, scene.rank_rows]);
}

#[test]
fn ten_thousand_jobs_are_each_answered_once_and_in_order() {
    let mut scene = StreamBridgeFixture::new(2);
    let mut staff = WorkerThreads::default();
    (0..2).for_each(|_| staff.hire(&scene.socket, honest));
    scene.until_seated(2);
    for _ in 0..100 {
        scene.pass(100, 3);
    }
    assert_eq!(scene.words.answered_at(), 10_000);
    let [_, workers, executor] = scene.tally();
    assert_eq!(workers + executor, scene.rank_rows);
}

#[test]
fn numbers_go_round_without_anybody_noticing() {
    let mut scene = StreamBridgeFixture::beginning_at(1, u32::MAX - 25);
    let mut staff = WorkerThreads::default();
    staff.hire(&scene.socket, honest);
    scene.until_seated(1);
    (0..10).for_each(|_| scene.pass(5, 20));
    assert_eq!(scene.words.answered_at(), 24);
}

#[test]
fn workers_that_die_stop_fail_or_hoard_hold_no_device_up_and_cost_no_bit() {
    let mut scene = StreamBridgeFixture::new(6);
    let mut staff = WorkerThreads::default();
    for behaviour in [honest, honest, dies_after_claim, hoards, fails_everything, comes_and_goes] {
        staff.hire(&scene.socket, behaviour);
    }
    scene.run_until("many are lost, and work is done", |stats| {
        let done: u64 = stats.workers.iter().map(|line| line.slices).sum();
        stats.workers_lost >= 40 && done > 0
    });
    drop(staff);
    scene.until_seated(0);
    scene.pass(10, 256);
    let [_, workers, executor] = scene.tally();
    assert_eq!(workers + executor, scene.rank_rows, "every rank of every row, once");
}

#[test]
fn workers_that_leave_at_any_moment_of_a_pass_cost_no_bit() {
    let mut scene = StreamBridgeFixture::new(3);
    for round in 0..40 {
        let mut staff = WorkerThreads::default();
        (0..3).for_each(|_| staff.hire(&scene.socket, honest));
        scene.until_seated(3);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_micros(317 * (round % 13)));
                drop(staff);
            });
            scene.pass(20, 100);
        });
        scene.until_seated(0);
    }
}

#[test]
fn the_workers_are_let_go_in_the_middle_of_a_pass_and_the_executor_goes_on_alone() {
    let mut scene = StreamBridgeFixture::new(2);
    let mut staff = WorkerThreads::default();
    (0..2).for_each(|_| staff.hire(&scene.socket, honest));
    scene.until_seated(2);
    let workers = std::mem::take(&mut scene.workers);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(2));
            drop(workers);
        });
        scene.pass(100, 60);
    });
    scene.pass(10, 60);
}

#[test]
fn a_panic_of_the_bridge_fails_the_pass_alone_and_the_device_goes_on() {
    let mut scene = StreamBridgeFixture::new(1);
    let mut staff = WorkerThreads::default();
    staff.hire(&scene.socket, honest);
    scene.until_seated(1);
    for round in 1..40 {
        scene.pass(3, 40);
        scene.words.panic_at_write(round);
        // The stream must end, or `synchronize` would not return.
        let has_panicked = scene.try_pass(10, 40) == Err(CudaError::Unanswered);
        assert!(
            has_panicked != scene.words.is_to_panic(),
            "round {round}: it fails if it panics, and only then"
        );
        assert!(has_panicked || round > 10, "a pass of ten jobs writes ten times at least");
        scene.words.panic_at_write(0);
    }
    scene.pass(10, 256);
    assert_eq!(scene.stats().workers_lost, 0, "the workers have nothing to do with it");
}

#[test]
fn what_a_failed_pass_posted_and_never_asked_for_holds_nobody_up() {
    let mut scene = StreamBridgeFixture::new(1);
    let mut staff = WorkerThreads::default();
    staff.hire(&scene.socket, honest);
    scene.until_seated(1);
    for asked in 0..6 {
        let questions: Vec<_> = (0..6).map(|_| scene.question(30)).collect();
        scene.bridge().begin_pass();
        let mut last = 0;
        for (at, question) in questions.iter().enumerate() {
            last = scene.bridge().post(question.job());
            // For some jobs the stream waits without a request.
            if at < asked {
                scene.stream.enqueue(StreamOp::Ask { number: last, x: question.x.clone() });
            }
            if at <= asked {
                scene.stream.enqueue(StreamOp::Add { number: last, elements: question.elements() });
            }
        }
        if asked % 2 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let ended = scene.bridge().end_pass();
        assert_eq!(ended, Err(CudaError::Unanswered));
        assert_eq!(scene.stream.synchronize().len(), asked + 1, "the stream is let go");
        let words = scene.words.clone();
        until(|| has_reached(words.answered_at(), last), || "all that was posted is answered".to_owned());
        (0..3).for_each(|_| scene.pass(6, 30));
    }
}

#[test]
fn a_pass_that_was_never_ended_is_over_when_the_next_begins() {
    let mut scene = StreamBridgeFixture::new(1);
    let question = scene.question(30);
    scene.bridge().begin_pass();
    scene.bridge().post(question.job());
    scene.pass(5, 30);
}

#[test]
fn a_bridge_that_goes_in_the_middle_of_a_pass_lets_the_stream_go() {
    for delay_us in (0..4000).step_by(331) {
        let mut scene = StreamBridgeFixture::new(1);
        let mut staff = WorkerThreads::default();
        staff.hire(&scene.socket, honest);
        let questions: Vec<_> = (0..50).map(|_| scene.question(100)).collect();
        scene.bridge().begin_pass();
        for (at, question) in questions.iter().enumerate() {
            let number = scene.bridge().post(question.job());
            // The stream never requests the last of them.
            if at < 40 {
                scene.stream.enqueue(StreamOp::Ask { number, x: question.x.clone() });
            }
            scene.stream.enqueue(StreamOp::Add { number, elements: question.elements() });
        }
        std::thread::sleep(Duration::from_micros(delay_us));
        scene.bridge = None;
        assert_eq!(scene.stream.synchronize().len(), 50);
    }
}

#[test]
#[should_panic(expected = "the rows of a job fit the slab")]
fn a_job_larger_than_the_slab_is_a_mistake_of_whoever_posts_it() {
    let mut scene = StreamBridgeFixture::new(0);
    let question = scene.question(10);
    scene.bridge().begin_pass();
    scene.bridge().post(AssistJob { x_rows: 1 << 20, ..question.job() });
}

#[test]
fn the_largest_jobs_that_are_configured_fit_the_slab_and_the_sums() {
    let mut scene = StreamBridgeFixture::new(0);
    let adapter = Arc::clone(&scene.adapters[0]);
    scene.bridge().begin_pass();
    for targets in GROUPS {
        let rows = if targets == [Target::LmHead] { ROWS.head } else { ROWS.pass };
        let mut asks = Vec::new();
        let (mut offset, mut width) = (0, 0);
        for &target in targets {
            let matrix = adapter.matrix(0, target).unwrap();
            let adapter = Arc::clone(&adapter);
            asks.push(OwnedPartialSum { adapter, layer: 0, target, first_row: 0, rows, ranks: 1, offset });
            offset += rows * matrix.rows();
            width = matrix.columns();
        }
        scene.bridge().post(AssistJob { asks, width, x_rows: rows, sums: offset });
    }
    assert_eq!(scene.bridge().end_pass(), Err(CudaError::Unanswered));
}
