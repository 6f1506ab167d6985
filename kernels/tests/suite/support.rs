//! Support of the tests: seeded data, stored tensors of every type, pools, and comparison of results.

use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use kernels::{
    ActivationForms, Activations, Isa, Rounding, TensorType, ThreadPool,
    lora::{LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes},
    quant,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

pub(crate) const TYPES: [TensorType; 12] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::Bf16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
    TensorType::Mxfp4,
];

pub(crate) fn is_float(kind: TensorType) -> bool {
    matches!(kind, TensorType::F32 | TensorType::F16 | TensorType::Bf16)
}

pub(crate) fn random(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// `count` values in -1..1.
pub(crate) fn floats(random: &mut StdRng, count: usize) -> Vec<f32> {
    (0..count).map(|_| random.random_range(-1.0..1.0)).collect()
}

pub(crate) fn pool(threads: usize) -> ThreadPool {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    if threads == 1 {
        // Without a core: a test that computes alone need not be pinned.
        return ThreadPool::new(&[]).expect("a pool of the caller alone");
    }
    let cores = CORES.get_or_init(|| {
        let allowed = rustix::thread::sched_getaffinity(None).expect("the cores of this thread");
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect()
    });
    let cores: Vec<usize> = (0..threads).map(|i| cores[i % cores.len()]).collect();
    ThreadPool::new(&cores).expect("threads on allowed cores")
}

/// A stored tensor of `kind`: random codes, and scales and minima of the size in trained weights.
pub(crate) fn stored(kind: TensorType, rows: usize, columns: usize, random: &mut StdRng) -> Vec<u8> {
    let elements = rows * columns;
    match kind {
        TensorType::F32 => floats(random, elements).into_iter().flat_map(f32::to_le_bytes).collect(),
        TensorType::F16 => {
            floats(random, elements).into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect()
        }
        TensorType::Bf16 => {
            floats(random, elements).into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()
        }
        _ => {
            let mut bytes = vec![0; kind.row_bytes(elements).expect("rows of whole blocks")];
            random.fill(&mut bytes[..]);
            for block in bytes.chunks_exact_mut(kind.block_bytes()) {
                for &at in half_fields(kind) {
                    let half = f16::from_f32(random.random_range(-0.05..0.05));
                    block[at..at + 2].copy_from_slice(&half.to_le_bytes());
                }
                if kind == TensorType::Mxfp4 {
                    block[0] = 121 + block[0] % 4;
                }
            }
            bytes
        }
    }
}

/// Offsets of a block's 16-bit fields: the scale and, if there is one, the minimum.
fn half_fields(kind: TensorType) -> &'static [usize] {
    match kind {
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => &[0, 2],
        TensorType::Q6K => &[208],
        TensorType::Mxfp4 => &[],
        _ => &[0],
    }
}

pub(crate) fn dequantize(kind: TensorType, data: &[u8], elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    quant::dequantize_row(kind, data, &mut values);
    values
}

/// `values` as `rows` rows of activations in `forms`, some of whose groups are wide.
pub(crate) fn activations(
    pool: &mut ThreadPool,
    isa: Isa,
    values: &[f32],
    rows: usize,
    forms: ActivationForms,
) -> Activations {
    rounded(pool, isa, values, rows, forms, Rounding::wide_above(1.0))
}

pub(crate) fn rounded(
    pool: &mut ThreadPool,
    isa: Isa,
    values: &[f32],
    rows: usize,
    forms: ActivationForms,
    rounding: Rounding,
) -> Activations {
    let mut x = Activations::default();
    x.reshape(rows, values.len() / rows);
    x.values_mut().copy_from_slice(values);
    x.prepare(pool, isa, forms, rounding);
    x
}

/// One adapted layer in memory of its own; `a` is `[rank, columns]`, `b` is `[rows, rank]`.
#[allow(clippy::too_many_arguments, reason = "the parts of one matrix product")]
pub(crate) fn lora_matrix(
    rank: usize,
    columns: usize,
    rows: usize,
    scale: f32,
    a: &[f32],
    b: &[f32],
    precision: LoraPrecision,
) -> LoraMatrix {
    let mut bytes = Vec::new();
    let layout = MatrixLayout::append(&mut bytes, rank, columns, rows, scale, a, b, precision);
    let bytes: SharedBytes = Arc::new(bytes);
    LoraMatrix::over(&bytes, layout).expect("a layout of these bytes")
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub(crate) fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Asserts `|got - wanted| <= tolerance` for each element. NaN always fails.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], wanted: &[f32], tolerance: f64, what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}: as many values");
    for (i, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        let error = (f64::from(got) - f64::from(wanted)).abs();
        assert!(
            error <= tolerance,
            "{what}: element {i} is {got}, not {wanted} (off by {error:e} > {tolerance:e})"
        );
    }
}
