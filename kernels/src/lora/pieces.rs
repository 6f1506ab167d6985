//! Cuts factors into *pieces* that fit the blocks of a pool, and assigns their offsets.
//!
//! A device's memory is a pool of equal blocks that hold KV cache or pieces of adapters, so an adapter takes
//! any free blocks, not only adjacent ones. A piece is a rank block's part of a factor, or, where blocks are
//! small, as many of its columns (A) or outputs (B) as fit. Kernels find a piece in a table, by rank block
//! and number. The order of sums does not depend on the cut.

use std::ops::Range;

use super::layout::{ElementKind, FactorLayout, MatrixLayout, RANK_BLOCK};

/// Alignment of pieces, in bytes: a CPU cache line, which also suffices for a GPU's loads.
pub const PIECE_ALIGNMENT: usize = 64;

/// Minimum features of a piece, unless it is the only one: a chain of the shrink, a tile of the expand.
const LEAST_FEATURES: usize = 64;

/// Blocks that a packing keeps open. Pieces have few sizes, so other blocks rarely have more room.
const MAX_OPEN: usize = 8;

/// One of a matrix's two factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Factor {
    /// Factor `A`, `[rank, columns]`.
    A,
    /// Factor `B`, `[outputs, rank]`.
    B,
}

/// Cut of a factor's rank blocks along its columns (A) or outputs (B), into pieces of `1 << shift`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FactorCut {
    /// Features per piece, as a power of two; the last piece may have fewer.
    pub shift: u32,
    /// Pieces per rank block.
    pub count: usize,
}

impl FactorCut {
    /// Each rank block is one piece.
    pub(super) const WHOLE: Self = Self { shift: usize::BITS - 1, count: 1 };

    /// Returns the cut with the largest pieces that fit `room` bytes, by the bytes of a feature.
    fn of(features: usize, feature_bytes: usize, room: usize) -> Option<Self> {
        // Elements in pairs take up to one feature more.
        if (features + 1) * feature_bytes <= room {
            return Some(Self::WHOLE);
        }
        let fitting = room / feature_bytes;
        if fitting < LEAST_FEATURES {
            return None;
        }
        let shift = fitting.ilog2();
        Some(Self { shift, count: features.div_ceil(1 << shift) })
    }

    /// Returns the features of piece `number`, of `features` in all.
    pub(super) fn features(self, number: usize, features: usize) -> Range<usize> {
        if self.count == 1 {
            return 0..features;
        }
        number << self.shift..features.min((number + 1) << self.shift)
    }
}

/// Position of a piece in an adapter's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PieceOffset {
    /// Index of the block among the adapter's.
    pub block: u32,
    /// Byte offset within the block.
    pub offset: u32,
}

/// Blocks that are filled with the pieces of one adapter.
#[derive(Debug)]
pub struct Packing {
    room: usize,
    blocks: u32,
    /// Blocks with room left, and their used bytes.
    open: Vec<(u32, usize)>,
}

impl Packing {
    /// Creates an empty packing for blocks of `block_bytes`. Blocks that would misalign pieces have no room.
    #[must_use]
    pub fn new(block_bytes: usize) -> Self {
        let room = if block_bytes.is_multiple_of(PIECE_ALIGNMENT) { block_bytes } else { 0 };
        Self { room, blocks: 0, open: Vec::new() }
    }

    /// Returns the number of blocks in use.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Reserves `bytes` bytes; `None` if a block is too small for them.
    pub fn place(&mut self, bytes: usize) -> Option<PieceOffset> {
        let bytes = bytes.next_multiple_of(PIECE_ALIGNMENT);
        if bytes > self.room || self.room > u32::MAX as usize {
            return None;
        }
        if let Some((block, taken)) = self.open.iter_mut().find(|(_, taken)| self.room - *taken >= bytes) {
            let place = PieceOffset { block: *block, offset: *taken as u32 };
            *taken += bytes;
            return Some(place);
        }
        if self.open.len() == MAX_OPEN {
            let fullest = (0..MAX_OPEN).max_by_key(|&index| self.open[index].1)?;
            self.open.swap_remove(fullest);
        }
        let block = self.blocks;
        self.blocks += 1;
        self.open.push((block, bytes));
        Some(PieceOffset { block, offset: 0 })
    }
}

/// Offsets of all pieces of one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PieceTable {
    cuts: [FactorCut; 2],
    /// Offsets per factor, by rank block and then by number.
    places: [Box<[PieceOffset]>; 2],
}

impl PieceTable {
    /// Packs the pieces of a matrix in the order of reading; `None` if a block is too small for the smallest.
    #[must_use]
    pub fn pack(layout: &MatrixLayout, packing: &mut Packing) -> Option<Self> {
        let cuts = [layout.cut(Factor::A, packing.room)?, layout.cut(Factor::B, packing.room)?];
        let blocks = layout.rank.div_ceil(RANK_BLOCK);
        let nowhere = PieceOffset { block: u32::MAX, offset: 0 };
        let mut places = cuts.map(|cut| vec![nowhere; blocks * cut.count].into_boxed_slice());
        for (factor, (cut, places)) in [Factor::A, Factor::B].into_iter().zip(cuts.iter().zip(&mut places)) {
            for (index, place) in places.iter_mut().enumerate() {
                let piece = layout.piece(factor, *cut, index / cut.count, index % cut.count);
                *place = packing.place(piece.len())?;
            }
        }
        Some(Self { cuts, places })
    }

    /// Returns the cut of a factor.
    #[must_use]
    pub fn cut(&self, factor: Factor) -> FactorCut {
        self.cuts[factor as usize]
    }

    /// Returns the offsets of a factor's pieces, by rank block and then by number.
    #[must_use]
    pub fn of(&self, factor: Factor) -> &[PieceOffset] {
        &self.places[factor as usize]
    }
}

impl MatrixLayout {
    fn factor(&self, factor: Factor) -> FactorLayout {
        match factor {
            Factor::A => self.a,
            Factor::B => self.b,
        }
    }

    /// Returns the number of features that a factor is cut along: A's columns, B's outputs.
    pub(super) fn features(&self, factor: Factor) -> usize {
        match factor {
            Factor::A => self.columns,
            Factor::B => self.rows,
        }
    }

    /// Returns the cut of a factor into pieces of at most `room` bytes.
    fn cut(&self, factor: Factor, room: usize) -> Option<FactorCut> {
        let ranks = RANK_BLOCK.min(self.rank).next_multiple_of(2);
        FactorCut::of(self.features(factor), ranks * self.factor(factor).kind.bytes(), room)
    }

    /// Returns the bytes of a piece, relative to the factor's first byte.
    pub(crate) fn piece(
        &self,
        factor: Factor,
        cut: FactorCut,
        rank_block: usize,
        number: usize,
    ) -> Range<usize> {
        let first = rank_block * RANK_BLOCK;
        let end = self.rank.min(first + RANK_BLOCK);
        let kind = self.factor(factor).kind;
        let paired = |count: usize| if kind == ElementKind::Bf16 { count.next_multiple_of(2) } else { count };
        let features = cut.features(number, self.features(factor));
        match factor {
            Factor::A => {
                let (base, each) = (self.a_bytes_before(first), (end - first) * kind.bytes());
                base + features.start * each..base + paired(features.end) * each
            }
            Factor::B => {
                let (base, each) = (self.b_bytes_before(first), paired(end - first) * kind.bytes());
                base + features.start * each..base + features.end * each
            }
        }
    }
}
