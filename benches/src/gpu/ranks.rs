//! C-11 and C-12: the deltas of a decode step alone, at true ranks and padded to the batch's largest rank.
//!
//! The rig has adapters on q, k and v of several layers, each with blocks of its own, so that no cache holds
//! what a step reads next. The time of random batches is fitted to two lines: the sum of the ranks (S-LoRA's
//! MBGMV, our true ranks), and their number times the largest (Punica's BGMV, our padded ranks).

use std::sync::Arc;

use anyhow::Result;
use kernels::{
    cuda::{
        Cuda, CudaError, CudaStream, Matrix,
        lora::{LoraPlan, LoraSegment, StagedAdapter, UploadQueue, add_deltas},
    },
    lora::{ElementKind, LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes},
};
use model::shape::{layout::linear_shape, source::Target as Layer};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{
    adapters, fit,
    lab::{GpuBenchContext, GpuMeasurement, map, own},
    overhead::BENCH,
    roofline,
};
use crate::{
    measure::Samples,
    report::{BenchTarget, Better},
};

/// Adapted layers; those with a common input share one launch.
const TARGETS: [Layer; 3] = [Layer::Q, Layer::K, Layer::V];
/// Minimum R² of both forms, by their own lines.
const LEAST_FIT: f64 = 0.95;
/// Minimum share of a copy's bandwidth, both kernels (C-11).
const LEAST_BANDWIDTH: f64 = 0.7;
/// Rank of the bandwidth measurement: all adapters are equal, so there is no padding.
const RANK: usize = 16;

/// Prints every row of this benchmark.
///
/// # Errors
/// If the device lacks memory or is lost.
pub(super) fn run(lab: &GpuBenchContext) -> Result<()> {
    let mut rig = RankBench::new(lab)?;
    bandwidth(lab, &mut rig)?;
    fits(lab, &mut rig)
}

/// Bytes of the factors per second, with a batch of all adapters.
fn bandwidth(lab: &GpuBenchContext, rig: &mut RankBench) -> Result<()> {
    let slots = lab.sizes.adapters;
    let copied = roofline::copy_gbps(lab)?;
    for &rank in lab.sizes.ranks {
        let batch = vec![rank; slots];
        let (bytes, layers) = (rig.bytes(&batch), rig.layers.len());
        let ms = rig.ms(lab, &batch, LoraPlan::new)?;
        let figure = GpuMeasurement {
            bench: BENCH,
            case: format!("deltas of {slots} adapters of rank {rank}, q k v of {layers} layers"),
            unit: "GB/s of factors",
            better: Better::Higher,
            ours: map(&ms, |ms| bytes as f64 / ms / 1e6)?,
        };
        let goal = (rank >= RANK).then_some(BenchTarget::RatioAtLeast(LEAST_BANDWIDTH));
        lab.report(figure, own("a copy on the device", copied.clone()), goal)?;
    }
    Ok(())
}

/// R² of each form's time by each line.
fn fits(lab: &GpuBenchContext, rig: &mut RankBench) -> Result<()> {
    let mut random = StdRng::seed_from_u64(12);
    let mixes: Vec<Vec<usize>> = (0..lab.sizes.mixes)
        .map(|_| {
            let count = random.random_range(1..=lab.sizes.adapters);
            (0..count).map(|_| lab.sizes.ranks[random.random_range(0..lab.sizes.ranks.len())]).collect()
        })
        .collect();
    let forms = [("true ranks", LoraPlan::new as EmptyPlan, false), ("padded ranks", LoraPlan::padded, true)];
    for (form, empty, is_padded) in forms {
        let mut times = Vec::new();
        for mix in &mixes {
            times.push(rig.ms(lab, mix, empty)?.median());
        }
        let line = |of: fn(&[usize]) -> usize| {
            let points: Vec<_> = mixes.iter().zip(&times).map(|(mix, &ms)| (of(mix) as f64, ms)).collect();
            Samples::new(vec![fit::r_squared(&points)?])
        };
        let sum = (line(|mix| mix.iter().sum())?, "the sum of ranks");
        let most = (line(|mix| mix.len() * mix.iter().max().unwrap_or(&0))?, "count times the largest rank");
        let (ours, other) = if is_padded { (most, sum) } else { (sum, most) };
        let figure = GpuMeasurement {
            bench: BENCH,
            case: format!("{form}: time of {} random batches told by {}", mixes.len(), ours.1),
            unit: "R²",
            better: Better::Higher,
            ours: ours.0,
        };
        lab.report(
            figure,
            own(format!("told by {}", other.1), other.0),
            Some(BenchTarget::OursAtLeast(LEAST_FIT)),
        )?;
    }
    Ok(())
}

/// Creates a plan of one form, without segments.
type EmptyPlan = fn(&Arc<Cuda>) -> Result<LoraPlan, CudaError>;

/// Adapters on the device, and the outputs that their deltas are added to.
struct RankBench {
    stream: CudaStream,
    /// `[layer][rank][slot]`, each with all targets.
    layers: Vec<Vec<Vec<StagedAdapter>>>,
    ranks: &'static [usize],
    /// Bytes of all targets of one adapter in one layer, for each rank.
    bytes: Vec<usize>,
    /// Offsets of the targets' first outputs, in columns.
    columns: [usize; 3],
    x: Matrix,
    out: Matrix,
}

impl RankBench {
    fn new(lab: &GpuBenchContext) -> Result<Self> {
        let (config, sizes) = (lab.config(), &lab.sizes);
        let (stream, lane) = (CudaStream::new(&lab.cuda)?, UploadQueue::new(&lab.cuda)?);
        let mut random = StdRng::seed_from_u64(11);
        let shapes = TARGETS.map(|target| linear_shape(config, target));
        let mut hosts = Vec::new();
        for &rank in sizes.ranks {
            let [q, k, v] = shapes.map(|shape| host(shape, rank, &mut random));
            hosts.push([q?, k?, v?]);
        }
        let mut layers = Vec::new();
        for _ in 0..sizes.rig_layers {
            let staged = hosts
                .iter()
                .map(|host| (0..sizes.adapters).map(|_| stage(&lane, host)).collect::<Result<Vec<_>>>());
            layers.push(staged.collect::<Result<Vec<_>>>()?);
        }
        lane.finish()?;
        let [queries, keys, values] = shapes.map(|[rows, _]| rows);
        let mut x = Matrix::new(&lab.cuda, ElementKind::Bf16)?;
        x.reshape(sizes.adapters, config.hidden_size)?;
        let numbers: Vec<f32> =
            (0..sizes.adapters * config.hidden_size).map(|_| random.random_range(-1.0..1.0)).collect();
        x.upload(&stream, 0, &numbers)?;
        let mut out = Matrix::new(&lab.cuda, ElementKind::Bf16)?;
        out.reshape(sizes.adapters, queries + keys + values)?;
        out.upload(&stream, 0, &vec![0.5; sizes.adapters * (queries + keys + values)])?;
        let bytes = hosts.iter().map(|host| host.iter().map(LoraMatrix::bytes).sum()).collect();
        let columns = [0, queries, queries + keys];
        Ok(Self { stream, layers, ranks: sizes.ranks, bytes, columns, x, out })
    }

    fn index(&self, rank: usize) -> usize {
        self.ranks.iter().position(|&known| known == rank).unwrap_or(0)
    }

    fn bytes(&self, batch: &[usize]) -> usize {
        self.layers.len() * batch.iter().map(|&rank| self.bytes[self.index(rank)]).sum::<usize>()
    }

    /// Milliseconds of the deltas in all layers, with one row per adapter of `batch`, a list of ranks.
    fn ms(&mut self, lab: &GpuBenchContext, batch: &[usize], empty: EmptyPlan) -> Result<Samples> {
        let groups: Vec<Vec<LoraSegment<'_>>> =
            (0..self.layers.len()).map(|layer| self.segments(layer, batch)).collect();
        let mut plan = empty(&lab.cuda)?;
        plan.upload(&self.stream, &groups)?;
        drop(groups);
        let (stream, x, out) = (&self.stream, &self.x, &mut self.out);
        lab.device_ms(stream, || {
            (0..self.layers.len())
                .try_for_each(|layer| add_deltas(stream, &plan, layer, x, out))
                .map_err(Into::into)
        })
    }

    fn segments(&self, layer: usize, batch: &[usize]) -> Vec<LoraSegment<'_>> {
        let segments = |(row, &rank): (usize, &usize)| {
            let matrices = self.layers[layer][self.index(rank)][row].matrices();
            let segment = move |(matrix, column)| LoraSegment {
                first_row: row,
                rows: 1,
                matrix,
                first_rank: 0,
                column,
            };
            matrices.iter().zip(self.columns).map(segment)
        };
        batch.iter().enumerate().flat_map(segments).collect()
    }
}

fn host([rows, columns]: [usize; 2], rank: usize, random: &mut StdRng) -> Result<LoraMatrix> {
    let mut numbers = |count| (0..count).map(|_| random.random_range(-0.05..0.05)).collect::<Vec<f32>>();
    let (a, b) = (numbers(rank * columns), numbers(rows * rank));
    let mut bytes = Vec::new();
    let layout = MatrixLayout::append(&mut bytes, rank, columns, rows, 1.0, &a, &b, LoraPrecision::Compact);
    let bytes: SharedBytes = Arc::new(bytes);
    Ok(LoraMatrix::over(&bytes, layout)?)
}

/// Copies the factors to the device, into blocks of their own.
fn stage(lane: &Arc<UploadQueue>, host: &[LoraMatrix; 3]) -> Result<StagedAdapter> {
    let (pool, blocks) = adapters::pool_of(lane, host, adapters::BLOCK_BYTES)?;
    let staged = StagedAdapter::new(lane, pool.lease(&blocks), host);
    for (index, matrix) in host.iter().enumerate() {
        while staged.copy_next(index, matrix, None)? > 0 {}
    }
    Ok(staged)
}
