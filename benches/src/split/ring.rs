//! The product modulo 2^48 beside the product of rounded activations and beside the product with 64-bit
//! words, on one thread.

use std::{
    cell::RefCell,
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use kernels::{
    Activations, Isa, LinearPart, Modulus, PackedMatrix, Rounding, TensorType, ThreadPool, linear,
    linear_ring, linear_ring_by_words,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::SplitRow;
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::{Contestant, Samples, alternate},
    report::{BenchTarget, Better, Comparison},
};

const MODULUS: Modulus = Modulus::Bits48;
const WIDTH: usize = 1536;
/// Matrices in turn: as in a model, they do not fit into the second-level cache.
const MATRICES: usize = 24;
/// Maximum ratio of the time of one row to that of `fast`.
const ROW_MOST: f64 = 2.5;
/// Minimum speedup over 64-bit words.
const WORDS_LEAST: f64 = 3.0;
const PROMPT_ROWS: usize = 128;
/// Rows per turn, together or one by one.
const ROWS_OF_A_TURN: usize = 512;

/// One format per packing.
const FORMATS: [(TensorType, &str); 4] = [
    (TensorType::Q4_1, "Q4_1"),
    (TensorType::Q8_0, "Q8_0"),
    (TensorType::Q6K, "Q6_K"),
    (TensorType::F16, "F16"),
];

pub(super) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let (runs, core) = (config.runs, cores.numbers()[0]);
    // A new thread, since a pool pins its caller to a core.
    let measured = thread::spawn(move || {
        let mut pool = ThreadPool::new(&[core]).context("no thread")?;
        let mut comparisons = Vec::new();
        for (kind, format) in FORMATS {
            let sides = ModularMatrices::new(kind)?;
            for rows in [1, PROMPT_ROWS] {
                comparisons.extend(sides.compare(&mut pool, runs, rows, format)?);
            }
        }
        Ok(comparisons)
    });
    measured.join().unwrap_or_else(|_| Err(anyhow!("measuring products panicked")))
}

struct ModularMatrices {
    matrices: Vec<PackedMatrix>,
    exponent: i32,
    numbers: Vec<u8>,
    values: Vec<f32>,
}

impl ModularMatrices {
    fn new(kind: TensorType) -> Result<Self> {
        let mut random = StdRng::seed_from_u64(1);
        // Two such bytes form a small half-precision number, so the scales and weights stay small.
        let bytes = kind.row_bytes(WIDTH).context("no whole rows")? * WIDTH;
        let data: Vec<u8> = (0..bytes).map(|_| 0x2c ^ random.random_range(0..4)).collect();
        let pack = |_| PackedMatrix::pack(kind, &data, WIDTH, WIDTH);
        let matrices: Vec<_> = (0..MATRICES).map(pack).collect::<Result<_, _>>()?;
        let exponent = matrices[0].ring_form().context("no whole numbers")?.exact();
        let count = PROMPT_ROWS * WIDTH;
        let numbers = (0..MODULUS.bytes() * count).map(|_| random.random()).collect();
        let values = (0..count).map(|_| random.random_range(-1.0..1.0)).collect();
        Ok(Self { matrices, exponent, numbers, values })
    }

    fn compare(
        &self,
        pool: &mut ThreadPool,
        runs: usize,
        rows: usize,
        format: &'static str,
    ) -> Result<Vec<Comparison>> {
        let pool = RefCell::new(pool);
        let side = |product: fn(&Self, &mut ThreadPool, usize) -> Duration| -> Contestant<'_, f64> {
            let pool = &pool;
            Box::new(move |_| Ok(product(self, &mut pool.borrow_mut(), rows).as_secs_f64() * 1e6))
        };
        let measured = alternate(runs, [side(Self::time_modular), side(Self::fast), side(Self::by_words)])?;
        let [ring, fast, by_words] = measured.map(Samples::new);
        let (ring, fast, by_words) = (ring?, fast?, by_words?);
        let row = |target: BenchTarget| SplitRow {
            bench: "split-masking",
            case: format!("{WIDTH} x {WIDTH} modulo 2^{}, {format}, rows: {rows}", MODULUS.bits()),
            unit: "us",
            better: Better::Lower,
            target: (rows == 1).then_some(target),
        };
        Ok(vec![
            row(BenchTarget::ShareAtMost(ROW_MOST)).beside(&ring, "fast", &fast),
            row(BenchTarget::RatioAtLeast(WORDS_LEAST)).beside(&ring, "by words of 64 bits", &by_words),
        ])
    }

    fn time_modular(&self, pool: &mut ThreadPool, rows: usize) -> Duration {
        self.modulo(pool, rows, linear_ring)
    }

    fn by_words(&self, pool: &mut ThreadPool, rows: usize) -> Duration {
        self.modulo(pool, rows, linear_ring_by_words)
    }

    fn modulo(&self, pool: &mut ThreadPool, rows: usize, product: ModularProduct) -> Duration {
        let bytes = rows * WIDTH * MODULUS.bytes();
        let (x, mut out) = (&self.numbers[..bytes], vec![0; bytes]);
        self.repeated(rows, |part| {
            product(pool, Isa::best(), MODULUS, x, rows, &part, self.exponent, &mut out, WIDTH);
        })
    }

    fn fast(&self, pool: &mut ThreadPool, rows: usize) -> Duration {
        let (mut x, mut out) = (Activations::default(), vec![0.0; rows * WIDTH]);
        self.repeated(rows, |part| {
            x.reshape(rows, WIDTH);
            x.values_mut().copy_from_slice(&self.values[..rows * WIDTH]);
            x.prepare(pool, Isa::best(), part[0].matrix.forms(), Rounding::INT8);
            linear(pool, Isa::best(), &x, &part, &mut out, WIDTH);
        })
    }

    /// Mean time of a product of `rows` rows over a turn, after a warm-up over all matrices.
    fn repeated(&self, rows: usize, mut product: impl FnMut([LinearPart<'_>; 1])) -> Duration {
        let times = (ROWS_OF_A_TURN / rows).max(MATRICES / 4);
        let mut meet = |matrix: &PackedMatrix| {
            product([LinearPart { matrix: black_box(matrix), bias: None, column: 0 }])
        };
        self.matrices.iter().for_each(&mut meet);
        let begun = Instant::now();
        self.matrices.iter().cycle().take(times).for_each(meet);
        begun.elapsed() / u32::try_from(times).unwrap_or(u32::MAX)
    }
}

type ModularProduct =
    fn(&mut ThreadPool, Isa, Modulus, &[u8], usize, &[LinearPart<'_>], i32, &mut [u8], usize);
