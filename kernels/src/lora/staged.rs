//! A copy of a layer on the device, which is computed with while it is filled.
//!
//! It lies in pieces, in blocks that a pool lends. Rank blocks arrive from the last to the first, so what is here is always
//! `first_rank..rank`.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{
    layout::{MatrixLayout, RANK_BLOCK},
    matrix::{Address, FactorView, LoraMatrix},
    pieces::{Factor, FactorCut, PieceOffset, PieceTable},
};
use crate::blocks::{BlockLease, LeaseGuard};

/// The device's copy of a [`LoraMatrix`].
#[derive(Debug)]
pub struct StagedMatrix {
    layout: MatrixLayout,
    loan: Arc<BlockLease>,
    cuts: [FactorCut; 2],
    /// Of each factor, by rank block and then by number.
    pieces: [Box<[Address]>; 2],
    /// Ranks from here on are in their pieces and are never written again. Written by [`Self::copy_next`] alone.
    first_rank: AtomicUsize,
    /// Held by who copies.
    copying: Mutex<()>,
}

impl StagedMatrix {
    /// A copy of `host` at `places` of `loan`, with no rank in it yet.
    ///
    /// # Panics
    ///
    /// If the places are not those of `host` in blocks of this size.
    #[must_use]
    pub fn new(loan: &Arc<BlockLease>, host: &LoraMatrix, places: &PieceTable) -> Self {
        let layout = *host.layout();
        let pieces = [Factor::A, Factor::B].map(|factor| {
            let cut = places.cut(factor);
            let address = |(index, place): (usize, &PieceOffset)| {
                let bytes = layout.piece(factor, cut, index / cut.count, index % cut.count).len();
                Address(loan.address(place.block as usize, place.offset as usize, bytes))
            };
            let places = places.of(factor);
            assert_eq!(places.len(), layout.rank.div_ceil(RANK_BLOCK) * cut.count, "a place for each piece");
            places.iter().enumerate().map(address).collect()
        });
        Self {
            layout,
            loan: Arc::clone(loan),
            cuts: [Factor::A, Factor::B].map(|factor| places.cut(factor)),
            pieces,
            first_rank: AtomicUsize::new(layout.rank),
            copying: Mutex::new(()),
        }
    }

    /// Bytes that the next [`Self::copy_next`] copies; `None` once all ranks are here.
    #[must_use]
    pub fn next_bytes(&self) -> Option<usize> {
        let last = self.first_rank().checked_sub(1)?;
        Some(self.pieces_of(last / RANK_BLOCK).map(|(factor, index)| self.source(factor, index).len()).sum())
    }

    /// Copies the last rank block that is not here yet, A's and B's part of it, and returns their bytes: 0 if all
    /// ranks are here, or the blocks were given back. A rank that is not a multiple of [`RANK_BLOCK`] makes the first block to
    /// arrive a short one.
    ///
    /// # Panics
    ///
    /// If `host` is not the matrix this is the copy of.
    pub fn copy_next(&self, host: &LoraMatrix) -> usize {
        assert!(self.is_of(host), "the staged copy is of this matrix");
        let _alone = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        let end = self.first_rank.load(Ordering::Relaxed);
        let (Some(last), Some(_held)) = (end.checked_sub(1), self.loan.guard()) else {
            return 0;
        };
        let mut copied = 0;
        for (factor, index) in self.pieces_of(last / RANK_BLOCK) {
            let from = &host.factors()[factor as usize][self.source(factor, index)];
            let Address(to) = self.pieces[factor as usize][index];
            // SAFETY: 1. The piece was seen to lie within a block, and no other piece lies there. 2. The block is lent as long as
            // we hold the loan. 3. Nobody reads it: readers keep to ranks from `first_rank` on, which are other pieces.
            // 4. Nobody else writes: we hold `copying`.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
            copied += from.len();
        }
        // SYNC POINT staged-ranks: releases the block's bytes with its ranks.
        self.first_rank.store(last / RANK_BLOCK * RANK_BLOCK, Ordering::Release);
        copied
    }

    /// Ranks from this one on are here.
    #[must_use]
    pub fn first_rank(&self) -> usize {
        // SYNC POINT staged-ranks: acquires the bytes of the ranks that are seen.
        self.first_rank.load(Ordering::Acquire)
    }

    /// True if `host` has this copy's shape, scale and kinds.
    pub(super) fn is_of(&self, host: &LoraMatrix) -> bool {
        self.layout == *host.layout()
    }

    /// The pieces of a rank block, in the order in which they travel.
    fn pieces_of(&self, rank_block: usize) -> impl Iterator<Item = (Factor, usize)> {
        let of = move |factor: Factor| {
            let FactorCut { count, .. } = self.cuts[factor as usize];
            (rank_block * count..(rank_block + 1) * count).map(move |index| (factor, index))
        };
        of(Factor::A).chain(of(Factor::B))
    }

    /// The bytes of the factor that a piece is of.
    fn source(&self, factor: Factor, index: usize) -> Range<usize> {
        let cut = self.cuts[factor as usize];
        self.layout.piece(factor, cut, index / cut.count, index % cut.count)
    }

    /// Keeps the blocks from being given back.
    ///
    /// # Panics
    ///
    /// If they were.
    pub(super) fn guard(&self) -> LeaseGuard<'_> {
        self.loan.guard().expect("nothing is computed with a copy that was given up")
    }

    /// The factors of ranks `from..` as kernels read them.
    ///
    /// # Panics
    ///
    /// If this is another matrix's copy than `host`'s, or lacks one of these ranks.
    pub(super) fn factors(&self, host: &LoraMatrix, from: usize) -> [FactorView<'_>; 2] {
        assert!(self.is_of(host), "the staged copy is of this matrix");
        assert!(self.first_rank() <= from, "the staged copy has the ranks that no head covers");
        [Factor::A, Factor::B]
            .map(|factor| FactorView::Pieces(self.cuts[factor as usize], &self.pieces[factor as usize]))
    }
}
