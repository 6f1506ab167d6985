//! Support of the tests: the device, random numbers, and comparison of results.

use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use kernels::{
    cuda::{Cuda, CudaError, CudaStream, Matrix},
    lora::ElementKind,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// The device shared by all tests of this process, or `None` with a printed reason.
///
/// # Panics
///
/// If there is none, although `HOLOBIONT_REQUIRE_CUDA=1` asks for one.
pub(crate) fn device() -> Option<Arc<Cuda>> {
    static DEVICE: OnceLock<Result<Arc<Cuda>, CudaError>> = OnceLock::new();
    match DEVICE.get_or_init(|| Cuda::open(0)) {
        Ok(cuda) => Some(Arc::clone(cuda)),
        Err(error) => {
            let required = std::env::var_os("HOLOBIONT_REQUIRE_CUDA").is_some_and(|value| value == "1");
            assert!(!required, "HOLOBIONT_REQUIRE_CUDA=1, but {error}");
            let test = std::thread::current().name().unwrap_or("a test").to_owned();
            eprintln!("skipped {test}: {error} (scripts/cuda-on-cpu builds a stand-in)");
            None
        }
    }
}

/// A device and a stream on it, or `None` with a printed reason.
pub(crate) fn stream() -> Option<CudaStream> {
    Some(CudaStream::new(&device()?).unwrap())
}

/// True if the device is the stand-in, whose faults can be provoked without losing a real one.
pub(crate) fn is_stand_in(cuda: &Cuda) -> bool {
    cuda.info().name == "CUDA on this CPU"
}

pub(crate) const KINDS: [ElementKind; 3] = [ElementKind::F32, ElementKind::F16, ElementKind::Bf16];

pub(crate) struct SeededNumbers(StdRng);

impl SeededNumbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// Roughly normal values: mean 0, deviation 1, none beyond 3.5.
    pub(crate) fn normals(&mut self, count: usize) -> Vec<f32> {
        let mut normal = || (0..4).map(|_| self.0.random_range(-1.0f32..1.0)).sum::<f32>() * 0.866;
        (0..count).map(|_| normal()).collect()
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }
}

/// Values after rounding to `kind`.
pub(crate) fn rounded(kind: ElementKind, values: &[f32]) -> Vec<f32> {
    let round = |&value: &f32| match kind {
        ElementKind::F32 => value,
        ElementKind::F16 => f16::from_f32(value).to_f32(),
        ElementKind::Bf16 => bf16::from_f32(value).to_f32(),
    };
    values.iter().map(round).collect()
}

pub(crate) fn matrix(stream: &CudaStream, kind: ElementKind, width: usize, values: &[f32]) -> Matrix {
    let mut matrix = Matrix::new(stream.cuda(), kind).unwrap();
    matrix.reshape(values.len() / width, width).unwrap();
    matrix.upload(stream, 0, values).unwrap();
    matrix
}

/// An output matrix filled with NaN.
pub(crate) fn unwritten(stream: &CudaStream, kind: ElementKind, rows: usize, width: usize) -> Matrix {
    let mut matrix = Matrix::new(stream.cuda(), kind).unwrap();
    matrix.reshape(rows, width).unwrap();
    matrix.upload(stream, 0, &vec![f32::NAN; rows * width]).unwrap();
    matrix
}

/// Relative rounding error of one value of `kind`.
pub(crate) fn epsilon(kind: ElementKind) -> f32 {
    match kind {
        ElementKind::F32 => 2f32.powi(-24),
        ElementKind::F16 => 2f32.powi(-11),
        ElementKind::Bf16 => 2f32.powi(-8),
    }
}

/// Norm of `got - want` relative to that of `want`; infinite if `got` has a NaN.
pub(crate) fn distance(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len(), "results of one size");
    let square = |sum: f64, value: f64| sum + value * value;
    let difference = got.iter().zip(want).map(|(&got, &want)| f64::from(got) - f64::from(want));
    let far = difference.fold(0.0, square).sqrt();
    let long = want.iter().map(|&value| f64::from(value)).fold(0.0, square).sqrt();
    if far.is_nan() { f64::INFINITY } else { far / long.max(f64::MIN_POSITIVE) }
}

/// Compares value by value: each may be off by `tolerance` times the larger of its own and the typical
/// magnitude.
///
/// # Panics
///
/// If a value is further off; the message names the worst.
pub(crate) fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}: results of one size");
    let typical = (want.iter().map(|value| value * value).sum::<f32>() / want.len().max(1) as f32).sqrt();
    let error = |(&got, &want): (&f32, &f32)| {
        let off = (got - want).abs() / want.abs().max(typical).max(f32::MIN_POSITIVE);
        if off.is_nan() { f32::INFINITY } else { off }
    };
    let errors = got.iter().zip(want).map(error).enumerate();
    let Some((at, worst)) = errors.max_by(|(_, one), (_, other)| one.total_cmp(other)) else { return };
    assert!(
        worst <= tolerance,
        "{what}: number {at} is {} and should be {} (off by {worst:e}, allowed {tolerance:e})",
        got[at],
        want[at]
    );
}
