//! An adapted layer on the host and on the device.

use std::sync::{Arc, OnceLock};

use kernels::{
    cuda::{
        BlockMemory, CudaStream,
        lora::{LoraSegment, RegisteredBytes, StagedAdapter, StagedMatrix, UploadQueue},
    },
    lora::{ElementKind, LoraMatrix, LoraPrecision, MatrixLayout, SharedBytes},
};

use crate::support::{SeededNumbers, rounded};

/// Size of blocks that hold a rank block of any factor here.
pub(super) const LARGE_BLOCK: usize = 1 << 20;

pub(super) struct Layer {
    pub(super) host: LoraMatrix,
    pub(super) adapter: StagedAdapter,
    /// Blocks of the layer, with foreign blocks between.
    pub(super) blocks: Vec<u32>,
    /// Factors `[rank, columns]` and `[outputs, rank]`, as stored.
    a: Vec<f32>,
    b: Vec<f32>,
    scale: f32,
}

pub(super) struct Encoded {
    pub(super) bytes: Vec<u8>,
    layout: MatrixLayout,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Encoded {
    pub(super) fn new(
        random: &mut SeededNumbers,
        kind: ElementKind,
        [rank, columns, outputs]: [usize; 3],
    ) -> Self {
        let a = rounded(kind, &random.normals(rank * columns));
        let b = rounded(kind, &random.normals(outputs * rank));
        let precision = if kind == ElementKind::Bf16 { LoraPrecision::Bf16 } else { LoraPrecision::Exact };
        let mut bytes = Vec::new();
        let scale = scale(rank, columns);
        let layout = MatrixLayout::append(&mut bytes, rank, columns, outputs, scale, &a, &b, precision);
        // A single random value may be exact in 16 bits by chance.
        let stored = [layout.a.kind, layout.b.kind];
        assert!(stored.into_iter().all(|stored| stored == kind || rank * outputs < 16));
        Self { bytes, layout, a, b }
    }
}

fn scale(rank: usize, columns: usize) -> f32 {
    0.7 / ((rank * columns) as f32).sqrt()
}

/// Upload queue of all layers whose upload is not observed.
fn lane(stream: &CudaStream) -> &'static Arc<UploadQueue> {
    static LANE: OnceLock<Arc<UploadQueue>> = OnceLock::new();
    LANE.get_or_init(|| UploadQueue::new(stream.cuda()).unwrap())
}

impl Layer {
    /// Reserves scattered, unordered blocks of `memory` for `encoded`, which lies in `bytes`.
    pub(super) fn over(
        lane: &Arc<UploadQueue>,
        bytes: &SharedBytes,
        encoded: Encoded,
        memory: &Arc<BlockMemory>,
    ) -> Self {
        let Encoded { layout, a, b, .. } = encoded;
        let host = LoraMatrix::over(bytes, layout).unwrap();
        let count = StagedAdapter::blocks_for([&host], memory.block_bytes()).unwrap();
        let blocks: Vec<u32> = (0..count).rev().map(|block| 2 * block + 1).collect();
        let adapter = StagedAdapter::new(lane, memory.lease(&blocks), [&host]);
        let scale = scale(host.rank(), host.columns());
        Self { host, adapter, blocks, a, b, scale }
    }

    /// Random layer of `kind` without any block on the device.
    pub(super) fn absent(
        lane: &Arc<UploadQueue>,
        random: &mut SeededNumbers,
        kind: ElementKind,
        shape: [usize; 3],
        memory: &Arc<BlockMemory>,
    ) -> Self {
        let mut encoded = Encoded::new(random, kind, shape);
        let bytes: SharedBytes = Arc::new(std::mem::take(&mut encoded.bytes));
        Self::over(lane, &bytes, encoded, memory)
    }

    pub(super) fn new(
        stream: &CudaStream,
        random: &mut SeededNumbers,
        kind: ElementKind,
        shape: [usize; 3],
    ) -> Self {
        Self::in_blocks(stream, random, kind, shape, LARGE_BLOCK)
    }

    pub(super) fn in_blocks(
        stream: &CudaStream,
        random: &mut SeededNumbers,
        kind: ElementKind,
        shape: [usize; 3],
        block_bytes: usize,
    ) -> Self {
        // Twice the bytes of pieces and tables, and the waste in blocks of few pieces.
        let bytes: usize = 4 * shape[0].next_multiple_of(16) * (shape[1] + shape[2]);
        let blocks = 2 * (2 * bytes).div_ceil(block_bytes) + 9;
        let memory = BlockMemory::new(stream.cuda(), block_bytes, blocks).unwrap();
        let layer = Self::absent(lane(stream), random, kind, shape, &memory);
        while layer.copy_next(None) > 0 {}
        layer.adapter.finish().unwrap();
        layer
    }

    pub(super) fn staged(&self) -> &StagedMatrix {
        &self.adapter.matrices()[0]
    }

    pub(super) fn copy_next(&self, registered: Option<&Arc<RegisteredBytes>>) -> usize {
        self.adapter.copy_next(0, &self.host, registered).unwrap()
    }

    pub(super) fn segment(&self, first_row: usize, rows: usize, column: usize) -> LoraSegment<'_> {
        LoraSegment { first_row, rows, matrix: self.staged(), first_rank: 0, column }
    }

    /// Delta of one row by ranks `first..`.
    pub(super) fn delta(&self, x: &[f32], first: usize) -> Vec<f64> {
        let (rank, columns) = (self.host.rank(), self.host.columns());
        let product = |(x, a): (&f32, &f32)| f64::from(*x) * f64::from(*a);
        let inner = |r: usize| -> f64 { x.iter().zip(&self.a[r * columns..][..columns]).map(product).sum() };
        let sums: Vec<f64> = (first..rank).map(inner).collect();
        let outer = |row: &[f32]| -> f64 {
            row[first..].iter().zip(&sums).map(|(b, sum)| f64::from(*b) * sum).sum::<f64>()
        };
        self.b.chunks(rank).map(|row| f64::from(self.scale) * outer(row)).collect()
    }
}
