//! How factors are cut into *pieces* that fit the blocks of a pool, and where each of them lies.
//!
//! A device's memory is a pool of equal blocks, any of which holds keys and values or pieces of adapters: so an adapter takes any
//! blocks that are free, however far apart. A piece is a rank block's part of a factor, or, where blocks are small, of its
//! columns (A) or outputs (B) as many as fit. Kernels find it in a table, by its rank block and its number in that; no sum's order
//! depends on how a factor is cut.

use std::ops::Range;

use super::layout::{ElementKind, FactorLayout, MatrixLayout, RANK_BLOCK};

/// Pieces start at multiples of this many bytes: a line of a CPU's caches, and what a GPU loads at once fits in.
pub const PIECE_ALIGNMENT: usize = 64;

/// Columns or outputs of the smallest piece that is not the only one: a chain of the shrink, and as many outputs as a tile of
/// the expand has.
const LEAST_FEATURES: usize = 64;

/// Blocks that a packing keeps open: pieces have few sizes, so what none of these has room for hardly any has.
const MAX_OPEN: usize = 8;

/// One of a matrix's two factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Factor {
    /// `A`, `[rank, columns]`.
    A,
    /// `B`, `[outputs, rank]`.
    B,
}

/// How a factor's rank blocks are cut: along its columns (A) or its outputs (B), into pieces of `1 << shift`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FactorCut {
    /// Features of a piece, as a power of two; the last one may have fewer.
    pub shift: u32,
    /// Pieces of a rank block.
    pub count: usize,
}

impl FactorCut {
    /// The whole rank block is one piece.
    pub(super) const WHOLE: Self = Self { shift: usize::BITS - 1, count: 1 };

    /// The largest pieces of `features` features with so many bytes each that fit `room`.
    fn of(features: usize, feature_bytes: usize, room: usize) -> Option<Self> {
        // Numbers that come in pairs take a feature more.
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

    /// Features of piece `number`, of `features` in all.
    pub(super) fn features(self, number: usize, features: usize) -> Range<usize> {
        if self.count == 1 {
            return 0..features;
        }
        number << self.shift..features.min((number + 1) << self.shift)
    }
}

/// Where a piece starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PieceOffset {
    /// Which of the adapter's blocks.
    pub block: u32,
    /// Byte of that block.
    pub offset: u32,
}

/// Blocks as they are filled with the pieces of one adapter.
#[derive(Debug)]
pub struct Packing {
    room: usize,
    blocks: u32,
    /// Blocks that have room left, and how much is taken.
    open: Vec<(u32, usize)>,
}

impl Packing {
    /// Nothing yet, for blocks of so many bytes. Nothing fits blocks that do not keep pieces aligned.
    #[must_use]
    pub fn new(block_bytes: usize) -> Self {
        let room = if block_bytes.is_multiple_of(PIECE_ALIGNMENT) { block_bytes } else { 0 };
        Self { room, blocks: 0, open: Vec::new() }
    }

    /// Blocks that are filled, wholly or partly.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// A place for `bytes` bytes; `None` if no block holds so many.
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

/// Where all pieces of one matrix lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PieceTable {
    cuts: [FactorCut; 2],
    /// Of each factor, by rank block and then by number.
    places: [Box<[PieceOffset]>; 2],
}

impl PieceTable {
    /// Packs the pieces of a matrix, in the order in which they are read; `None` if a block does not hold the least of them.
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

    /// How a factor is cut.
    #[must_use]
    pub fn cut(&self, factor: Factor) -> FactorCut {
        self.cuts[factor as usize]
    }

    /// Where a factor's pieces lie, by rank block and then by number.
    #[must_use]
    pub fn of(&self, factor: Factor) -> &[PieceOffset] {
        &self.places[factor as usize]
    }
}

impl MatrixLayout {
    /// How a factor is kept.
    fn factor(&self, factor: Factor) -> FactorLayout {
        match factor {
            Factor::A => self.a,
            Factor::B => self.b,
        }
    }

    /// What a factor is cut along: A's columns, B's outputs.
    pub(super) fn features(&self, factor: Factor) -> usize {
        match factor {
            Factor::A => self.columns,
            Factor::B => self.rows,
        }
    }

    /// How a factor is cut into pieces of at most `room` bytes.
    fn cut(&self, factor: Factor, room: usize) -> Option<FactorCut> {
        let ranks = RANK_BLOCK.min(self.rank).next_multiple_of(2);
        FactorCut::of(self.features(factor), ranks * self.factor(factor).kind.bytes(), room)
    }

    /// The bytes of a piece, counted from the factor's first.
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
