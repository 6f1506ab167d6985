use std::{
    sync::atomic::AtomicBool,
    thread::{self, JoinHandle},
};

use kernels::{
    Isa, ThreadPool,
    lora::{LoraPrecision, sum_ranks},
};
use model::{
    adapter::{Adapter, LoraModule, MethodWeights},
    deltas::prepared::PreparedAdapter,
    shape::{config::ModelConfig, source::Target},
};
use shmproto::board::{Geometry, WakeReason};
use types::AdapterVersion as Content;

use super::{worker_speed::FIRST_PATIENCE, *};
use crate::{adapter_images::module, fixtures::square_model};

const WIDTH: usize = 48;
const TARGETS: [Target; 3] = [Target::Q, Target::K, Target::V];
const ROOMY: Geometry = Geometry { x_elements: 1 << 16, sums_elements: 1 << 18, slices: 64, seats: 4 };

fn config() -> ModelConfig {
    square_model(WIDTH, 1)
}

/// An adapter of queries, keys and values; `salt` distinguishes adapters.
fn adapter(rank: usize, salt: usize) -> Arc<PreparedAdapter> {
    let numbers =
        |from: usize| (0..rank * WIDTH).map(|i| ((i * 31 + from * 17) % 101) as f32 / 64.0 - 0.7).collect();
    let module = |(at, &target): (usize, &Target)| {
        let (a, b) = (numbers(at + salt), numbers(at + salt + 50));
        LoraModule { layer: 0, target, rank, scale: 0.25, a, b }
    };
    let modules = TARGETS.iter().enumerate().map(module).collect();
    let adapter = Adapter {
        generation: Content([0; 32]),
        method: MethodWeights::Lora(modules),
        base_model: None,
        stored_in_16_bits: false,
    };
    Arc::new(PreparedAdapter::new(&adapter, &config(), LoraPrecision::Exact).unwrap())
}

/// Partial sums of a pass: some rows of some adapters, at the three linear layers of a group.
struct PassRequest {
    adapters: Vec<Arc<PreparedAdapter>>,
    x: Activations,
    /// First row, number of rows and ranks, by adapter.
    runs: Vec<[usize; 3]>,
}

impl PassRequest {
    fn new(runs: &[[usize; 3]]) -> Self {
        let rows = runs.iter().map(|[first, rows, _]| first + rows).max().unwrap();
        let mut x = Activations::default();
        x.reshape(rows, WIDTH);
        x.values_mut().iter_mut().enumerate().for_each(|(i, x)| *x = ((i * 13) % 37) as f32 / 16.0 - 1.0);
        let adapters =
            runs.iter().enumerate().map(|(salt, [_, _, ranks])| adapter(ranks + 3, salt)).collect();
        Self { adapters, x, runs: runs.to_vec() }
    }

    fn asks(&self) -> Vec<PartialSum<'_>> {
        let mut offset = 0;
        let mut asks = Vec::new();
        for (adapter, &[first_row, rows, ranks]) in self.adapters.iter().zip(&self.runs) {
            for target in TARGETS {
                let matrix = adapter.matrix(0, target).unwrap();
                asks.push(PartialSum { adapter, layer: 0, target, matrix, first_row, rows, ranks, offset });
                offset += rows * WIDTH;
            }
        }
        asks
    }

    /// Returns the expected sums.
    fn sums(&self) -> Vec<f32> {
        let mut sums = Vec::new();
        for ask in self.asks() {
            let x = &self.x.values()[ask.first_row * WIDTH..][..ask.rows * WIDTH];
            let mut part = vec![0.0; ask.elements()];
            sum_ranks(Isa::best(), x, ask.matrix, 0..ask.ranks, &mut part);
            sums.extend(part);
        }
        sums
    }

    fn rank_rows(&self) -> u64 {
        self.asks().iter().map(PartialSum::rank_rows).sum()
    }

    fn tally(&self) -> [u64; 3] {
        let tallies = self.adapters.iter().map(|adapter| adapter.tally().read());
        tallies.fold([0; 3], |[a, b, c], [x, y, z]| [a + x, b + y, c + z])
    }
}

struct DispatcherHarness {
    board: Board,
    assistant: WorkDispatcher,
    compute: Compute,
}

impl DispatcherHarness {
    fn new(geometry: Geometry) -> Self {
        let (board, producer) = Board::in_process(geometry).unwrap();
        let assistant = WorkDispatcher::new(board.clone(), producer, Arc::default(), Arc::default());
        let compute = Compute { pool: ThreadPool::new(&[]).unwrap(), isa: Isa::best() };
        Self { board, assistant, compute }
    }

    /// Posts and checks the sums; `meanwhile` runs between the two.
    fn ask(&mut self, question: &PassRequest, meanwhile: impl FnOnce()) {
        let asks = question.asks();
        let mut sums = vec![f32::NAN; question.sums().len()];
        self.assistant.begin_pass();
        self.assistant.begin(&question.x, &asks);
        meanwhile();
        self.assistant.finish(&mut self.compute, &question.x, &asks, &mut sums);
        self.assistant.end_pass();
        let bits = |sums: &[f32]| sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&sums), bits(&question.sums()));
    }

    /// A worker of this process, which finds the adapters of `question` by their ranks.
    fn worker(&self, question: &Arc<PassRequest>, over: &Arc<AtomicBool>) -> JoinHandle<()> {
        let mut seat = self.board.seat().unwrap().join_in_process();
        let (question, over) = (Arc::clone(question), Arc::clone(over));
        thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                if seat.wait(Duration::from_micros(50)) != WakeReason::Job {
                    continue;
                }
                while let Some(claim) = seat.claim(|_, _| true) {
                    let slice = *claim.slice();
                    let mut x = vec![0.0; slice.x_elements()];
                    let mut sums = vec![0.0; slice.sums_elements as usize];
                    claim.read_x(&mut x);
                    // Images of these adapters all have number 0, so the rank distinguishes them.
                    let ranks = slice.last_rank as usize;
                    let asks = question.asks();
                    let ask =
                        asks.iter().find(|ask| ask.ranks == ranks && module(0, ask.target) == slice.module);
                    sum_ranks(Isa::best(), &x, ask.unwrap().matrix, 0..ranks, &mut sums);
                    claim.done(&sums);
                }
            }
        })
    }
}

#[test]
fn what_nobody_begins_is_computed_here() {
    let mut bench = DispatcherHarness::new(ROOMY);
    let question = PassRequest::new(&[[0, 70, 20], [75, 1, 5], [80, 33, 64]]);
    bench.ask(&question, || {});
    let seat = bench.board.seat().unwrap().join_in_process();
    assert_eq!(bench.assistant.helpers(), 1);
    bench.ask(&question, || {});
    drop(seat);
    assert_eq!(question.tally(), [0, 0, 2 * question.rank_rows()]);
}

#[test]
fn one_to_four_workers_in_process_give_the_same_bits() {
    let question = Arc::new(PassRequest::new(&[[0, 70, 20], [75, 1, 5], [80, 33, 64]]));
    for count in 1..=4 {
        let mut bench = DispatcherHarness::new(ROOMY);
        let over = Arc::new(AtomicBool::new(false));
        let workers: Vec<_> = (0..count).map(|_| bench.worker(&question, &over)).collect();
        for round in 0..60 {
            bench.ask(&question, || thread::sleep(Duration::from_micros(round * 10)));
        }
        over.store(true, Ordering::Relaxed);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    }
    let [_, workers, executor] = question.tally();
    assert_eq!(workers + executor, 240 * question.rank_rows());
    assert!(workers > 0, "they did nothing");
}

#[test]
fn what_does_not_fit_on_the_board_is_computed_here() {
    let question = Arc::new(PassRequest::new(&[[0, 70, 20], [75, 1, 5], [80, 33, 64]]));
    let geometries = [
        Geometry { x_elements: 1, ..ROOMY },
        Geometry { x_elements: 70 * WIDTH, ..ROOMY },
        Geometry { x_elements: 34 * WIDTH, ..ROOMY },
        Geometry { sums_elements: 16, ..ROOMY },
        Geometry { sums_elements: 100 * WIDTH, ..ROOMY },
        Geometry { slices: 1, ..ROOMY },
        Geometry { slices: 7, ..ROOMY },
    ];
    for geometry in geometries {
        let mut bench = DispatcherHarness::new(geometry);
        let over = Arc::new(AtomicBool::new(false));
        let worker = bench.worker(&question, &over);
        for _ in 0..10 {
            bench.ask(&question, || thread::sleep(Duration::from_micros(300)));
        }
        over.store(true, Ordering::Relaxed);
        worker.join().unwrap();
    }
}

#[test]
fn one_that_only_ever_claims_is_fenced_after_a_while_and_is_waited_for_less_and_less() {
    let mut bench = DispatcherHarness::new(ROOMY);
    let question = PassRequest::new(&[[0, 70, 20]]);
    let mut seat = bench.board.seat().unwrap().join_in_process();
    let worker = seat.worker();
    let end = Instant::now() + Duration::from_secs(60);
    let mut waits = Vec::new();
    while bench.board.is_admitted(worker) {
        let before = bench.assistant.waits.us.load(Ordering::Relaxed);
        bench.ask(&question, || {
            while let Some(claim) = seat.claim(|_, _| true) {
                std::mem::forget(claim);
            }
        });
        waits.push(bench.assistant.waits.us.load(Ordering::Relaxed) - before);
        assert!(Instant::now() < end, "it is never given up");
    }
    assert!(waits.len() > 1);
    assert_eq!(seat.wait(Duration::ZERO), WakeReason::Fenced);
    assert!(bench.assistant.strikes.is_empty());
    assert_eq!(bench.assistant.helpers(), 0);
    // The shortest later wait is below the first, because waits become shorter.
    assert!(waits.iter().skip(1).min() <= waits.first(), "{waits:?}");
}

#[test]
fn those_who_struck_and_left_are_forgotten() {
    let mut bench = DispatcherHarness::new(ROOMY);
    let question = PassRequest::new(&[[0, 17, 20]]);
    for _ in 0..100 {
        let mut seat = bench.board.seat().unwrap().join_in_process();
        bench.ask(&question, || {
            std::mem::forget(seat.claim(|_, _| true).unwrap());
        });
        bench.board.fence(seat.worker());
    }
    assert!((1..=ROOMY.seats).contains(&bench.assistant.strikes.len()), "{:?}", bench.assistant.strikes);
}

#[test]
fn patience_follows_what_was_measured_and_old_figures_fade() {
    let mut speed = WorkerSpeed::default();
    assert_eq!(speed.patience(u64::MAX), FIRST_PATIENCE);
    speed.note(1_000_000, Duration::from_millis(1));
    assert_eq!(speed.patience(1_000_000), Duration::from_millis(4));
    assert_eq!(speed.patience(0), FIRST_PATIENCE / 4, "a clock's tick is no reason to give up");
    for _ in 0..10_000 {
        speed.note(1 << 24, Duration::from_millis(168));
    }
    let now = speed.patience(1 << 24);
    assert!((Duration::from_millis(600)..Duration::from_millis(700)).contains(&now), "{now:?}");
}
