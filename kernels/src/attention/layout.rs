//! How keys and values lie in blocks, and which rows are whose.

use crate::simd::LANES;

/// Positions a block holds.
pub const BLOCK_TOKENS: usize = LANES;

/// The widest head.
pub const MAX_HEAD_DIM: usize = 256;

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvPrecision {
    /// Singles.
    F32,
    /// Halves.
    F16,
    /// Bytes, and a scale for each key and each value of a head; on a CPU alone.
    Int8,
}

/// Shape of a pool of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Transformer blocks of the model.
    pub layers: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Bits of an element.
    pub precision: KvPrecision,
}

impl KvShape {
    pub(super) fn padded(self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Numbers of the keys of a head in a block; its values follow.
    pub(super) fn key_elements(self) -> usize {
        self.head_dim * BLOCK_TOKENS
    }

    /// Numbers of the keys and values of a head in a block; their scales follow, where they have any.
    pub(super) fn head_elements(self) -> usize {
        self.key_elements() + BLOCK_TOKENS * self.padded()
    }

    pub(super) fn head_bytes(self) -> usize {
        let scales =
            if self.precision == KvPrecision::Int8 { 2 * BLOCK_TOKENS * size_of::<f32>() } else { 0 };
        self.head_elements() * self.precision.number_bytes() + scales
    }

    /// Where a head of a layer begins in a block.
    pub(super) fn head_offset(self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * self.head_bytes()
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.layers * self.kv_heads * self.head_bytes()
    }
}

/// What attention of a layer leaves out, and how large scores get.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AttentionLimits {
    /// A query sees this many positions at most, its own among them.
    pub window: Option<usize>,
    /// A score `s` becomes `cap * tanh(s / cap)` (Gemma 2).
    pub cap: Option<f32>,
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct KvRows<'a> {
    /// First row in the batch.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// Position of the first row in its sequence.
    pub position: usize,
    /// The sequence's blocks.
    pub blocks: &'a [u32],
}

/// Where queries, keys and values lie in rows of `[q | k | v]`.
#[derive(Debug, Clone, Copy)]
pub struct QkvLayout {
    /// Query heads; a multiple of the key heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl QkvLayout {
    /// Elements of a row.
    #[must_use]
    pub fn stride(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    pub(crate) fn key_column(self) -> usize {
        self.heads * self.head_dim
    }

    pub(crate) fn value_column(self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim
    }
}
