//! Layout of keys and values in blocks, and assignment of rows to sequences.

use crate::simd::{GROUP, LANES};

/// Positions (tokens) per block.
pub const BLOCK_TOKENS: usize = LANES;

/// Maximum width of a head.
pub const MAX_HEAD_DIM: usize = 256;

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvPrecision {
    /// IEEE floats of 32 bits.
    F32,
    /// IEEE floats of 16 bits.
    F16,
    /// Bytes with one scale per key and per value of a head; CPU only.
    Int8,
    /// bf16, multiplied in the order of the matrix unit; CPU only.
    Bf16,
}

/// Shape of a pool of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Transformer layers of the model.
    pub layers: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Width of a head, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Element type of keys and values.
    pub precision: KvPrecision,
}

impl KvShape {
    pub(super) fn padded(self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Returns the number of key elements of a head in a block; the values follow the keys.
    pub(super) fn key_elements(self) -> usize {
        self.padded_key() * BLOCK_TOKENS
    }

    /// Returns the elements of a key, with the padding of [`KvPrecision::Bf16`].
    pub(super) fn padded_key(self) -> usize {
        match self.precision {
            KvPrecision::Bf16 => self.head_dim.next_multiple_of(GROUP),
            _ => self.head_dim,
        }
    }

    /// Returns the number of key and value elements of a head in a block; the scales, if any, follow them.
    pub(super) fn head_elements(self) -> usize {
        self.key_elements() + BLOCK_TOKENS * self.padded()
    }

    pub(super) fn head_bytes(self) -> usize {
        let scales =
            if self.precision == KvPrecision::Int8 { 2 * BLOCK_TOKENS * size_of::<f32>() } else { 0 };
        self.head_elements() * self.precision.number_bytes() + scales
    }

    pub(super) fn head_offset(self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * self.head_bytes()
    }

    /// Returns the bytes of one block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.layers * self.kv_heads * self.head_bytes()
    }
}

/// Sliding window and soft cap of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AttentionLimits {
    /// Maximum number of positions that a query sees, its own included.
    pub window: Option<usize>,
    /// Soft cap: a score `s` becomes `cap * tanh(s / cap)` (Gemma 2).
    pub cap: Option<f32>,
}

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct KvRows<'a> {
    /// First row in the batch.
    pub first_row: usize,
    /// Number of consecutive rows.
    pub rows: usize,
    /// Position of the first row in its sequence.
    pub position: usize,
    /// Block numbers of the sequence, in the order of positions.
    pub blocks: &'a [u32],
}

/// Layout of queries, keys and values in rows of `[q | k | v]`.
#[derive(Debug, Clone, Copy)]
pub struct QkvLayout {
    /// Number of query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Width of a head, in elements.
    pub head_dim: usize,
}

impl QkvLayout {
    /// Returns the number of elements per row.
    #[must_use]
    pub fn stride(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns the column of the first key in a row.
    #[must_use]
    pub fn key_column(self) -> usize {
        self.heads * self.head_dim
    }

    pub(crate) fn value_column(self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim
    }
}
