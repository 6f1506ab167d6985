//! `x A B` of one adapted layer, beside PyTorch: cost of a cold prompt's rows on CPU cores.
//!
//! A prompt of 128 tokens, a hidden size of 4096, rank 64: one pinned thread, two pinned threads of one pool,
//! and two independent pinned threads with half the rows each, as two workers. Our input and sums are 32-bit
//! in every form; PyTorch's bf16 form reads and returns bf16.

use std::{
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use kernels::{
    Activations, Isa, ThreadPool,
    lora::{LeadingSegment, LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes, sum_heads, sum_ranks},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    config::SuiteConfig,
    machine::{Cores, pin},
    measure::{Samples, alternate},
    peer::Python,
    report::{BenchTarget, Better, Comparison, PeerSamples},
};

const SCRIPT: &str = include_str!("xab.py");
const ROWS: usize = 128;
const HIDDEN: usize = 4096;
const RANK: usize = 64;

/// Warm-up calls, and calls whose median is a measurement.
const WARM_UP_CALLS: usize = 3;
const CALLS: usize = 15;
const RUNS: usize = 15;
/// OpenMP's threads spin for about a millisecond after their last region; ours wait until they sleep.
const PEER_SETTLES: Duration = Duration::from_millis(20);

/// Our format, and the dtype that PyTorch computes in.
struct AdapterFormat {
    name: &'static str,
    precision: LoraPrecision,
    peer: &'static str,
    target: f64,
}

const FORMS: [AdapterFormat; 3] = [
    AdapterFormat { name: "f32", precision: LoraPrecision::Exact, peer: "float32", target: 1.8 },
    AdapterFormat { name: "f16 stored", precision: LoraPrecision::Compact, peer: "float32", target: 1.8 },
    AdapterFormat { name: "bf16", precision: LoraPrecision::Bf16, peer: "bfloat16", target: 1.1 },
];

/// Measures every format with one thread, a pool of two, and two workers.
pub(crate) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let python = config.torch_python.as_ref().context("xab needs a Python with torch: --torch-python")?;
    let numbers = [ROWS, HIDDEN, RANK, WARM_UP_CALLS, CALLS].map(|number| number.to_string().into());
    let mut torch = Python::start(python, SCRIPT, &numbers)?;
    let mut comparisons = Vec::new();
    for form in FORMS {
        let product = LayerProduct::random(form.precision)?;
        let two = cores.numbers().get(..2);
        comparisons.push(contest(config, &form, "one thread", &mut torch, 1, || product.on_one_thread())?);
        if let Some(cores) = two {
            let mut pool = ThreadPool::new(cores).context("no threads on the cores")?;
            let pooled = || product.on_a_pool(&mut pool);
            comparisons.push(contest(config, &form, "two threads", &mut torch, 2, pooled)?);
            let workers = || product.by_workers(cores);
            comparisons.push(contest(
                config,
                &form,
                "two workers, half the rows each",
                &mut torch,
                2,
                workers,
            )?);
        }
    }
    Ok(comparisons)
}

fn contest(
    config: &SuiteConfig,
    form: &AdapterFormat,
    who: &str,
    torch: &mut Python,
    threads: usize,
    mut ours: impl FnMut() -> Result<f64>,
) -> Result<Comparison> {
    let runs = config.runs.max(RUNS);
    let [ours, theirs] = alternate(
        runs,
        [
            Box::new(|_| {
                thread::sleep(PEER_SETTLES);
                ours()
            }),
            Box::new(|_| ms(torch, form.peer, threads)),
        ],
    )?;
    Ok(Comparison {
        bench: "xab",
        case: format!("{ROWS} tokens, hidden {HIDDEN}, rank {RANK}, {}, {who}", form.name),
        unit: "ms",
        better: Better::Lower,
        ours: Samples::new(ours)?,
        rival: PeerSamples {
            name: format!("torch, threads: {threads}"),
            format: form.peer.to_owned(),
            samples: Samples::new(theirs)?,
        },
        target: (threads > 1).then_some(BenchTarget::RatioAtLeast(form.target)),
    })
}

/// Milliseconds of one PyTorch product: median of a few calls.
fn ms(torch: &mut Python, kind: &str, threads: usize) -> Result<f64> {
    let answer = torch.ask(&format!("{kind} {threads}"))?;
    answer.trim().parse().with_context(|| format!("Python answered {answer:?}, which is no number"))
}

struct LayerProduct {
    matrix: LoraMatrix,
    x: Activations,
}

impl LayerProduct {
    fn random(precision: LoraPrecision) -> Result<Self> {
        let random = &mut StdRng::seed_from_u64(1);
        let mut numbers =
            |count: usize| (0..count).map(|_| random.random_range(-0.5..0.5)).collect::<Vec<f32>>();
        let (a, b, values) = (numbers(RANK * HIDDEN), numbers(HIDDEN * RANK), numbers(ROWS * HIDDEN));
        let mut bytes = Vec::new();
        let layout = MatrixLayout::append(&mut bytes, RANK, HIDDEN, HIDDEN, 1.0, &a, &b, precision);
        let bytes: SharedBytes = Arc::new(bytes);
        let mut x = Activations::default();
        x.reshape(ROWS, HIDDEN);
        x.values_mut().copy_from_slice(&values);
        Ok(Self { matrix: LoraMatrix::over(&bytes, layout)?, x })
    }

    fn on_one_thread(&self) -> Result<f64> {
        let mut out = vec![0.0; ROWS * HIDDEN];
        median_ms(|| sum_ranks(Isa::best(), self.x.values(), &self.matrix, 0..RANK, &mut out))
    }

    fn on_a_pool(&self, pool: &mut ThreadPool) -> Result<f64> {
        let mut out = vec![0.0; ROWS * HIDDEN];
        let head = LeadingSegment { first_row: 0, rows: ROWS, matrix: &self.matrix, ranks: RANK, offset: 0 };
        median_ms(|| sum_heads(pool, Isa::best(), &self.x, &[head], &mut out))
    }

    /// Time from the common start to the end of the later worker.
    fn by_workers(&self, cores: &[usize]) -> Result<f64> {
        let mut out = vec![0.0; ROWS * HIDDEN];
        let share = ROWS / cores.len() * HIDDEN;
        let barrier = Barrier::new(cores.len());
        let both = thread::scope(|scope| {
            let parts = self.x.values().chunks(share).zip(out.chunks_mut(share)).zip(cores);
            let threads: Vec<_> = parts
                .map(|((x, out), &core)| {
                    let (barrier, matrix) = (&barrier, &self.matrix);
                    scope.spawn(move || {
                        // A thread that cannot be pinned still takes part, since the other would wait forever
                        // at the barrier.
                        let pinned = pin(core);
                        let call = || {
                            barrier.wait();
                            let started = Instant::now();
                            sum_ranks(Isa::best(), x, matrix, 0..RANK, out);
                            started.elapsed()
                        };
                        let times = times_of(call);
                        pinned.map(|()| times)
                    })
                })
                .collect();
            let done = threads.into_iter().map(|thread| thread.join().expect("a measuring thread panicked"));
            done.collect::<Result<Vec<_>>>()
        })?;
        // A call ends when the later worker ends.
        let later = (0..CALLS).map(|call| both.iter().map(|times| times[call]).fold(0.0, f64::max));
        Ok(Samples::new(later.collect())?.median())
    }
}

fn median_ms(mut call: impl FnMut()) -> Result<f64> {
    let times = times_of(|| {
        let started = Instant::now();
        call();
        started.elapsed()
    });
    Ok(Samples::new(times)?.median())
}

fn times_of(mut call: impl FnMut() -> Duration) -> Vec<f64> {
    (0..WARM_UP_CALLS + CALLS).map(|_| call().as_secs_f64() * 1000.0).skip(WARM_UP_CALLS).collect()
}
