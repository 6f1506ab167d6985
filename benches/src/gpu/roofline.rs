//! Measured limits of the device, in the same run: no result is compared with a data sheet.

use anyhow::Result;
use half::bf16;
use kernels::{
    TensorType,
    cuda::{Blas, CudaStream, DeviceVec, LinearPart, Matrix, Weight, Workspace, linear},
    lora::ElementKind,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::lab::{GpuBenchContext, map, own};
use crate::{measure::Samples, report::PeerSamples};

/// Number of distinct random values, which repeat in larger buffers: odd, so that rows differ.
const DISTINCT: usize = (1 << 20) - 3;

/// Gigabytes per second, read and written, of a copy within the device's memory.
///
/// # Errors
/// If the device lacks memory or is lost.
pub(super) fn copy_gbps(lab: &GpuBenchContext) -> Result<Samples> {
    let (words, repeats) = (lab.sizes.copied_words, lab.sizes.repeats);
    let stream = CudaStream::new(&lab.cuda)?;
    let mut random = StdRng::seed_from_u64(3);
    let numbers: Vec<u32> = (0..words.min(DISTINCT)).map(|_| random.random()).collect();
    let mut from = DeviceVec::new(&lab.cuda, words)?;
    for at in (0..words).step_by(numbers.len()) {
        stream.upload(&numbers[..numbers.len().min(words - at)], &mut from, at)?;
    }
    let mut to = DeviceVec::new(&lab.cuda, words)?;
    let ms = lab.device_ms(&stream, || {
        (0..repeats).try_for_each(|_| stream.copy(&from, 0, &mut to, 0, words)).map_err(Into::into)
    })?;
    stream.synchronize()?;
    map(&ms, |ms| (2 * 4 * words * repeats) as f64 / ms / 1e6)
}

pub(super) struct MatrixRate {
    pub(super) rival: PeerSamples,
    /// False if only our own kernel could be timed: then the rate is no limit of the device.
    pub(super) is_ceiling: bool,
}

/// Rate of a large square bf16 product: cuBLASLt's here, or PyTorch's if that was faster.
///
/// # Errors
/// If the device lacks memory or is lost.
pub(super) fn matrix_rate(lab: &GpuBenchContext) -> Result<MatrixRate> {
    let blas = Blas::open(&lab.cuda);
    if let Err(reason) = &blas {
        eprintln!("holobiont-bench: the matrix unit is timed without cuBLASLt: {reason}");
    }
    let (is_cublas, size) = (blas.is_ok(), lab.sizes.matrix);
    let with = if is_cublas { "cuBLASLt" } else { "our own product" };
    let name = format!("{with}, bf16, {size} x {size} x {size}");
    let ours = own(name, product_tflops(lab, Workspace::new(&lab.cuda, blas.ok()))?);
    let peer = lab.peers.rival("matmul")?;
    let is_ceiling = is_cublas || peer.is_some();
    let rival = match peer {
        Some(peer) if peer.samples.median() > ours.samples.median() => peer,
        _ => ours,
    };
    Ok(MatrixRate { rival, is_ceiling })
}

fn product_tflops(lab: &GpuBenchContext, mut workspace: Workspace) -> Result<Samples> {
    let (size, repeats) = (lab.sizes.matrix, lab.sizes.repeats);
    let stream = CudaStream::new(&lab.cuda)?;
    let mut random = StdRng::seed_from_u64(4);
    let distinct: Vec<f32> = (0..DISTINCT.min(size * size)).map(|_| random.random_range(-1.0..1.0)).collect();
    let numbers: Vec<f32> = distinct.iter().copied().cycle().take(size * size).collect();
    let bytes: Vec<u8> =
        numbers.iter().rev().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
    let weight = Weight::upload(&stream, TensorType::Bf16, &bytes, size, size)?;
    let (mut x, mut out) =
        (Matrix::new(&lab.cuda, ElementKind::Bf16)?, Matrix::new(&lab.cuda, ElementKind::Bf16)?);
    x.reshape(size, size)?;
    x.upload(&stream, 0, &numbers)?;
    out.reshape(size, size)?;
    let parts = [LinearPart { weight: &weight, bias: None, column: 0 }];
    let ms = lab.device_ms(&stream, || {
        (0..repeats)
            .try_for_each(|_| linear(&stream, &mut workspace, &x, &parts, &mut out))
            .map_err(Into::into)
    })?;
    let flops = 2.0 * (size as f64).powi(3) * repeats as f64;
    map(&ms, |ms| flops / ms / 1e9)
}
