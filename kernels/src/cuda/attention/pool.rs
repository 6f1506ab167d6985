//! KV blocks on the device, and the launches that write and read them.

use std::sync::Arc;

use super::RowTable;
use crate::{
    attention::{AttentionLimits, BLOCK_TOKENS, KvPrecision, KvShape, MAX_HEAD_DIM, QkvLayout},
    cuda::{
        BlockMemory, Cuda, CudaError, CudaStream, Matrix,
        launch::{Arg, LaunchShape, count, launch},
    },
    lora::ElementKind,
};

/// Head widths of the kernels for halves; heads are padded to the next width.
const WIDTHS: [usize; 4] = [64, 96, 128, MAX_HEAD_DIM];

/// Maximum number of queries of a group per thread block, in decode and in prefill.
const DECODE_QUERIES: usize = 8;
const PREFILL_QUERIES: usize = 64;

/// Threads per block, and features that one thread appends.
const ATTEND_THREADS: u32 = 128;
const APPEND_THREADS: u32 = 256;
const APPEND_FEATURES: usize = 8;

/// A pool of KV blocks on the device. Adapters may borrow blocks of its [memory](KvPool::memory).
#[derive(Debug)]
pub struct KvPool {
    shape: KvShape,
    /// Blocks in the layout that `kernels/cuda/attention.cuh` draws.
    memory: Arc<BlockMemory>,
}

const CPU_ONLY: [KvPrecision; 2] = [KvPrecision::Int8, KvPrecision::Bf16];
const BYTES: &str = "keys and values are bytes or bf16 on a CPU alone";

/// Returns the width that heads are padded to.
pub(super) fn padded_head(head_dim: usize) -> usize {
    WIDTHS.into_iter().find(|&width| head_dim <= width).unwrap_or(MAX_HEAD_DIM)
}

fn layer_elements(shape: KvShape) -> usize {
    shape.kv_heads * 2 * BLOCK_TOKENS * padded_head(shape.head_dim)
}

impl KvPool {
    /// Allocates a pool of `blocks` blocks. Contents are unspecified, but unwritten slots are never read.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    ///
    /// # Panics
    /// Panics if the heads are wider than [`MAX_HEAD_DIM`] or of odd width, or if the precision is for a CPU
    /// only.
    pub fn new(cuda: &Arc<Cuda>, shape: KvShape, blocks: usize) -> Result<Self, CudaError> {
        assert!(shape.head_dim <= MAX_HEAD_DIM, "heads of at most {MAX_HEAD_DIM}");
        assert!(shape.head_dim.is_multiple_of(2), "heads of an even width");
        assert!(!CPU_ONLY.contains(&shape.precision), "{BYTES}");
        Ok(Self { shape, memory: BlockMemory::new(cuda, Self::block_bytes(shape), blocks)? })
    }

    /// Returns the bytes of a block on the device, where heads are padded further than on the CPU.
    #[must_use]
    pub fn block_bytes(shape: KvShape) -> usize {
        shape.layers * layer_elements(shape) * shape.precision.number_bytes()
    }

    /// Returns the shape of all blocks.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.memory.blocks()
    }

    /// Returns the memory that holds the blocks.
    #[must_use]
    pub fn memory(&self) -> &Arc<BlockMemory> {
        &self.memory
    }

    /// Copies the [`KvPool::block_bytes`] bytes of a block in the order of `stream`, and waits for the copy.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if the block does not exist or is lent to an adapter, or `bytes` is not one block long.
    pub fn read_block(&self, stream: &CudaStream, block: u32, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.memory.read(stream, block, bytes)
    }

    /// Overwrites a block with bytes from [`KvPool::read_block`] of any device pool of this shape, in the
    /// order of `stream`, and waits for the copy.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics under the conditions of [`KvPool::read_block`].
    pub fn write_block(&mut self, stream: &CudaStream, block: u32, bytes: &[u8]) -> Result<(), CudaError> {
        self.memory.write(stream, block, bytes)
    }

    /// Writes the keys and values of `qkv` to the blocks of their sequences.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if the shapes do not match.
    pub fn append(
        &mut self,
        stream: &CudaStream,
        layer: usize,
        qkv: &Matrix,
        layout: QkvLayout,
        rows: &RowTable,
    ) -> Result<(), CudaError> {
        self.check(layer, qkv, layout, rows);
        let padded = padded_head(layout.head_dim);
        let threads = qkv.rows() * 2 * layout.kv_heads * padded / APPEND_FEATURES;
        let shape = LaunchShape::line(threads.div_ceil(APPEND_THREADS as usize), APPEND_THREADS);
        let name = match self.shape.precision {
            KvPrecision::F32 => "kv_append_f32",
            KvPrecision::F16 => "kv_append_f16",
            KvPrecision::Int8 | KvPrecision::Bf16 => unreachable!("{BYTES}"),
        };
        let arguments = [
            Arg::Ptr(qkv.address()),
            kind(qkv),
            Arg::U32(count(qkv.rows())),
            Arg::U32(count(layout.stride())),
            Arg::U32(count(layout.heads * layout.head_dim)),
            Arg::U32(count(layout.kv_heads)),
            Arg::U32(count(layout.head_dim)),
            Arg::U32(count(padded)),
            Arg::Ptr(rows.positions().address()),
            Arg::Ptr(rows.row_blocks()),
            Arg::Ptr(rows.blocks()),
            Arg::Ptr(self.memory.address()),
            Arg::U64(self.block_elements()),
            Arg::U64(self.layer_offset(layer)),
        ];
        // SAFETY: the arguments match the kernel. The kernel reads rows of `qkv` and as many entries of the table. The
        // kernel writes blocks that the table has verified to be of this pool, in a layer that exists.
        unsafe { launch(stream, name, shape, &arguments) }
    }

    /// Computes `out[row, head] = softmax(q · keys) values` over the row's position and earlier ones within
    /// `limits`. `out` has rows of `heads * head_dim`; rows of no sequence are unchanged. Queries are scaled.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if the shapes do not match.
    #[allow(clippy::too_many_arguments, reason = "one operation; its operands are what they are")]
    pub fn attend(
        &self,
        stream: &CudaStream,
        layer: usize,
        qkv: &Matrix,
        layout: QkvLayout,
        rows: &RowTable,
        limits: AttentionLimits,
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        self.check(layer, qkv, layout, rows);
        let width = layout.heads * layout.head_dim;
        assert_eq!((out.rows(), out.width()), (qkv.rows(), width), "a row of out for each row of qkv");
        assert_eq!(out.kind(), qkv.kind(), "numbers of one kind");
        assert_ne!(limits.window, Some(0), "a row sees itself");
        let attend = Attend { pool: self, stream, layer, qkv, layout, rows, limits, out };
        match self.shape.precision {
            KvPrecision::F32 => attend.exactly(),
            KvPrecision::F16 => {
                attend.tiles()?;
                attend.spans()?;
                attend.join()
            }
            KvPrecision::Int8 | KvPrecision::Bf16 => unreachable!("{BYTES}"),
        }
    }

    fn check(&self, layer: usize, qkv: &Matrix, layout: QkvLayout, rows: &RowTable) {
        assert!(layer < self.shape.layers, "layer {layer}");
        let heads = (layout.kv_heads, layout.head_dim);
        assert_eq!(heads, (self.shape.kv_heads, self.shape.head_dim), "the pool's heads");
        assert!(layout.heads.is_multiple_of(layout.kv_heads), "whole groups of heads");
        let table = rows.layout();
        assert_eq!(
            (layout.heads, heads),
            (table.heads, (table.kv_heads, table.head_dim)),
            "the table's heads"
        );
        assert!(Arc::ptr_eq(rows.pool(), &self.memory), "the table's blocks are of this pool");
        assert_eq!(qkv.width(), layout.stride(), "rows of [q | k | v]");
        let fits = (rows.rows()..=rows.capacity()).contains(&qkv.rows());
        assert!(fits, "{} rows, but the table has {} to {}", qkv.rows(), rows.rows(), rows.capacity());
    }

    fn block_elements(&self) -> u64 {
        (self.shape.layers * layer_elements(self.shape)) as u64
    }

    fn layer_offset(&self, layer: usize) -> u64 {
        (layer * layer_elements(self.shape)) as u64
    }
}

fn kind(matrix: &Matrix) -> Arg {
    Arg::U32(match matrix.kind() {
        ElementKind::F32 => 0,
        ElementKind::F16 => 1,
        ElementKind::Bf16 => 2,
    })
}

struct Attend<'a> {
    pool: &'a KvPool,
    stream: &'a CudaStream,
    layer: usize,
    qkv: &'a Matrix,
    layout: QkvLayout,
    rows: &'a RowTable,
    limits: AttentionLimits,
    out: &'a mut Matrix,
}

impl Attend<'_> {
    /// Returns the thread blocks per item or tile: parts of head groups of at most `queries` heads.
    fn parts(&self, queries: usize) -> usize {
        self.layout.kv_heads * (self.layout.heads / self.layout.kv_heads).div_ceil(queries)
    }

    fn padded(&self) -> usize {
        padded_head(self.layout.head_dim)
    }

    /// Returns the first arguments of all kernels for halves: queries, results and their layout.
    fn front(&self) -> [Arg; 8] {
        let QkvLayout { heads, kv_heads, head_dim } = self.layout;
        [
            Arg::Ptr(self.qkv.address()),
            Arg::Ptr(self.out.address()),
            kind(self.qkv),
            Arg::U32(count(self.qkv.rows())),
            Arg::U32(count(self.layout.stride())),
            Arg::U32(count(heads)),
            Arg::U32(count(kv_heads)),
            Arg::U32(count(head_dim)),
        ]
    }

    fn window(&self) -> Arg {
        // No context has more than 2^32 positions.
        Arg::U32(self.limits.window.and_then(|window| u32::try_from(window).ok()).unwrap_or(u32::MAX))
    }

    /// Returns the arguments for the KV cache, the window and the cap; a cap of 0 means none.
    fn keys(&self) -> [Arg; 6] {
        [
            Arg::Ptr(self.rows.blocks()),
            Arg::Ptr(self.pool.memory.address()),
            Arg::U64(self.pool.block_elements()),
            Arg::U64(self.pool.layer_offset(self.layer)),
            self.window(),
            Arg::F32(self.limits.cap.unwrap_or(0.0)),
        ]
    }

    /// Computes sequences with many new rows.
    fn tiles(&self) -> Result<(), CudaError> {
        let padded = self.padded();
        let (name, step) = match padded {
            64 => ("attention_prefill_64", 64),
            96 => ("attention_prefill_96", 64),
            128 => ("attention_prefill_128", 64),
            _ => ("attention_prefill_256", 32),
        };
        // Two stages of keys and values with rows padded by 16 bytes, plus the queries where registers cannot hold
        // them.
        let stages = 4 * step * (padded + 8) * 2;
        let queries = if padded > 128 { PREFILL_QUERIES * padded * 2 } else { 0 };
        let blocks = self.rows.shape().tiles * self.parts(PREFILL_QUERIES);
        let shape = LaunchShape::line(blocks, ATTEND_THREADS).sharing(stages + queries);
        let arguments = [&self.front()[..], &[Arg::Ptr(self.rows.tiles())], &self.keys()].concat();
        // SAFETY: the arguments match the kernel, and the shared memory has the size of its `Sizes`. Tiles name rows
        // below the given count, and blocks that the table has verified to be of this pool, written earlier in this
        // stream.
        unsafe { launch(self.stream, name, shape, &arguments) }
    }

    /// Computes each span of each item (sequences with few new rows).
    fn spans(&self) -> Result<(), CudaError> {
        let padded = self.padded();
        let name = match padded {
            64 => "attention_decode_64",
            96 => "attention_decode_96",
            128 => "attention_decode_128",
            _ => "attention_decode_256",
        };
        // 16 bytes for each load of each thread, for the blocks of positions in flight.
        let (loads, stages) = (padded / 16 + 4 * padded.div_ceil(64), if padded > 128 { 1 } else { 2 });
        let slots = ATTEND_THREADS as usize * stages * loads * 16;
        let shape = LaunchShape::plane(self.rows.shape().units, self.parts(DECODE_QUERIES), ATTEND_THREADS)
            .sharing(slots);
        let tables = [Arg::Ptr(self.rows.units()), Arg::Ptr(self.rows.items())];
        let results = [Arg::Ptr(self.rows.stats()), Arg::Ptr(self.rows.partials())];
        let arguments = [&self.front()[..], &tables, &self.keys(), &results].concat();
        // SAFETY: the conditions of `tiles` hold for items; partial results have a slot for each span and row of an
        // item with several spans.
        unsafe { launch(self.stream, name, shape, &arguments) }
    }

    /// Joins the spans of items with several spans.
    fn join(&self) -> Result<(), CudaError> {
        let QkvLayout { heads, head_dim, .. } = self.layout;
        let shape = LaunchShape::plane(self.rows.shape().joined_items, heads, ATTEND_THREADS);
        let arguments = [
            Arg::Ptr(self.out.address()),
            kind(self.out),
            Arg::U32(count(self.qkv.rows())),
            Arg::U32(count(heads)),
            Arg::U32(count(head_dim)),
            Arg::U32(count(self.padded())),
            Arg::Ptr(self.rows.items()),
            self.window(),
            Arg::Ptr(self.rows.stats()),
            Arg::Ptr(self.rows.partials()),
        ];
        // SAFETY: the arguments match the kernel; it reads only results that the previous launch of this stream wrote.
        unsafe { launch(self.stream, "attention_combine", shape, &arguments) }
    }

    fn exactly(&self) -> Result<(), CudaError> {
        let QkvLayout { heads, kv_heads, head_dim } = self.layout;
        let shape = LaunchShape::line(self.qkv.rows() * heads, ATTEND_THREADS);
        let front = [
            Arg::Ptr(self.qkv.address()),
            Arg::Ptr(self.out.address()),
            kind(self.qkv),
            Arg::U32(count(self.layout.stride())),
            Arg::U32(count(heads)),
            Arg::U32(count(kv_heads)),
            Arg::U32(count(head_dim)),
            Arg::U32(count(self.padded())),
            Arg::Ptr(self.rows.positions().address()),
            Arg::Ptr(self.rows.row_blocks()),
        ];
        let arguments = [&front[..], &self.keys()].concat();
        // SAFETY: the arguments match the kernel. Rows exist in all matrices and in the table; blocks are verified to
        // be of this pool.
        unsafe { launch(self.stream, "attention_exact", shape, &arguments) }
    }
}
