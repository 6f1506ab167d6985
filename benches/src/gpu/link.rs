//! The link between host and device: single copies by source memory, and adapters in their blocks.

use std::{sync::Arc, time::Instant};

use anyhow::Result;
use kernels::{
    cuda::{
        CudaStream, DeviceVec, Pinned,
        lora::{RegisteredBytes, StagedAdapter, UploadQueue},
    },
    lora::{LoraMatrix, LoraPrecision, MatrixLayout, PIECE_ALIGNMENT, RANK_BLOCK, SharedBytes},
};
use model::deltas::matrices::ImageNumber;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{
    adapters,
    lab::{GpuBenchContext, GpuMeasurement, own},
};
use crate::{measure::Samples, report::Better};

const BENCH: &str = "cuda-link";
const RANKS: [usize; 2] = [16, 64];

/// Prints every row of this benchmark.
///
/// # Errors
/// If the device lacks memory or is lost.
pub(super) fn run(lab: &GpuBenchContext) -> Result<()> {
    let lane = UploadQueue::new(&lab.cuda)?;
    let mut best = None;
    for &bytes in lab.sizes.copies {
        let [pageable, pinned] = copies(lab, bytes)?;
        let registered = registered(lab, &lane, bytes)?;
        let case = |from: &str| format!("{} KiB from {from} memory", bytes >> 10);
        lab.report(figure(case("pinned"), pinned.clone()), own("pageable memory", pageable), None)?;
        lab.report(figure(case("registered"), registered), own("pinned memory", pinned.clone()), None)?;
        best = Some(pinned);
    }
    let Some(best) = best else { return Ok(()) };
    for rank in RANKS {
        for (way, number) in [("registered", ImageNumber(1)), ("staged", ImageNumber::NONE)] {
            let (gbps, mb) = adapter(lab, &lane, rank, number)?;
            let case =
                format!("an adapter of rank {rank}, {mb:.1} MB in blocks of {RANK_BLOCK} ranks, {way}");
            lab.report(figure(case, gbps), own("pinned memory, one large copy", best.clone()), None)?;
        }
    }
    Ok(())
}

fn figure(case: String, ours: Samples) -> GpuMeasurement {
    GpuMeasurement { bench: BENCH, case, unit: "GB/s", better: Better::Higher, ours }
}

/// Synchronous copies, from pageable and from pinned memory.
fn copies(lab: &GpuBenchContext, bytes: usize) -> Result<[Samples; 2]> {
    let stream = CudaStream::new(&lab.cuda)?;
    let numbers = random_bytes(bytes);
    let pinned = Pinned::<u8>::new(&lab.cuda, bytes)?;
    pinned.write(0, &numbers);
    let mut to = DeviceVec::new(&lab.cuda, bytes)?;
    let mut gbps = |copy: &dyn Fn(&mut DeviceVec<u8>) -> Result<()>| {
        lab.samples(|| {
            let began = Instant::now();
            copy(&mut to)?;
            stream.synchronize()?;
            Ok(bytes as f64 / began.elapsed().as_secs_f64() / 1e9)
        })
    };
    let pageable = gbps(&|to| Ok(stream.upload(&numbers, to, 0)?))?;
    Ok([pageable, gbps(&|to| Ok(stream.upload_pinned(&pinned, bytes, to)?))?])
}

/// Synchronous copy of one rank block of `bytes` from registered memory: A's and B's part.
fn registered(lab: &GpuBenchContext, lane: &Arc<UploadQueue>, bytes: usize) -> Result<Samples> {
    let side = bytes / (2 * 2 * RANK_BLOCK);
    let mut random = StdRng::seed_from_u64(bytes as u64);
    let a: Vec<f32> = (0..RANK_BLOCK * side).map(|_| random.random_range(-0.05..0.05)).collect();
    let mut data = Vec::new();
    let layout = MatrixLayout::append(&mut data, RANK_BLOCK, side, side, 1.0, &a, &a, LoraPrecision::Compact);
    let data: SharedBytes = Arc::new(data);
    let matrix = LoraMatrix::over(&data, layout)?;
    let registered = Arc::new(RegisteredBytes::new(&lab.cuda, &data)?);
    lab.samples(|| {
        let (pool, blocks) = adapters::pool_of(lane, [&matrix], bytes.next_multiple_of(PIECE_ALIGNMENT))?;
        let staged = StagedAdapter::new(lane, pool.lease(&blocks), [&matrix]);
        let began = Instant::now();
        let copied = staged.copy_next(0, &matrix, Some(&registered))?;
        lane.finish()?;
        Ok(copied as f64 / began.elapsed().as_secs_f64() / 1e9)
    })
}

/// Copies an adapter on attention in all layers; returns gigabytes per second, and megabytes.
fn adapter(
    lab: &GpuBenchContext,
    lane: &Arc<UploadQueue>,
    rank: usize,
    number: ImageNumber,
) -> Result<(Samples, f64)> {
    let adapter = adapters::in_image(lab.config(), rank, number)?;
    let bytes = adapter.device_bytes() as f64;
    let gbps = lab.samples(|| {
        // Allocating its memory and registering the host's do not count.
        let copy = adapters::room(&adapter, lane)?;
        let began = Instant::now();
        adapters::travel(&adapter, &copy)?;
        Ok(bytes / began.elapsed().as_secs_f64() / 1e9)
    })?;
    Ok((gbps, bytes / 1e6))
}

fn random_bytes(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    StdRng::seed_from_u64(5).fill(&mut bytes[..]);
    bytes
}
