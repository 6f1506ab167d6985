//! A layer's copy on the device, usable while it is being filled.
//!
//! The copy lies in pieces, in blocks lent by a pool. Rank blocks arrive from the last to the first, so the
//! ranks that have arrived are always `first_rank..rank`.

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
    /// Addresses per factor, by rank block and then by number.
    pieces: [Box<[Address]>; 2],
    /// First rank that has arrived; later pieces are never rewritten. Only [`Self::copy_next`] writes it.
    first_rank: AtomicUsize,
    copying: Mutex<()>,
}

impl StagedMatrix {
    /// Creates a copy of `host` at `places` of `loan`; no rank has arrived yet.
    ///
    /// # Panics
    /// Panics if `places` are not those of `host` in blocks of this size.
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

    /// Returns the bytes that the next [`Self::copy_next`] copies, or `None` once all ranks have arrived.
    #[must_use]
    pub fn next_bytes(&self) -> Option<usize> {
        let last = self.first_rank().checked_sub(1)?;
        Some(self.pieces_of(last / RANK_BLOCK).map(|(factor, index)| self.source(factor, index).len()).sum())
    }

    /// Copies the last missing rank block, both its A and its B part. Returns the bytes, 0 if all ranks have
    /// arrived or the lease is over. The first block to arrive is short if the rank is not a multiple of
    /// [`RANK_BLOCK`].
    ///
    /// # Panics
    /// Panics if `host` is not the matrix that this is the copy of.
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
            // SAFETY: 1. The piece was verified to lie within a block, and no other piece overlaps it. 2. The block
            // stays lent while `_held` guards the lease. 3. No thread reads the piece: readers use only ranks from
            // `first_rank` on, which are other pieces. 4. No other thread writes it: this thread holds `copying`.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
            copied += from.len();
        }
        // SYNC POINT staged-ranks: releases the block's bytes with its ranks.
        self.first_rank.store(last / RANK_BLOCK * RANK_BLOCK, Ordering::Release);
        copied
    }

    /// Returns the first rank that has arrived.
    #[must_use]
    pub fn first_rank(&self) -> usize {
        // SYNC POINT staged-ranks: acquires the bytes of the ranks that are seen.
        self.first_rank.load(Ordering::Acquire)
    }

    /// True if `host` has this copy's shape, scale and element kinds.
    pub(super) fn is_of(&self, host: &LoraMatrix) -> bool {
        self.layout == *host.layout()
    }

    fn pieces_of(&self, rank_block: usize) -> impl Iterator<Item = (Factor, usize)> {
        let of = move |factor: Factor| {
            let FactorCut { count, .. } = self.cuts[factor as usize];
            (rank_block * count..(rank_block + 1) * count).map(move |index| (factor, index))
        };
        of(Factor::A).chain(of(Factor::B))
    }

    /// Returns the bytes of a piece, relative to its factor.
    fn source(&self, factor: Factor, index: usize) -> Range<usize> {
        let cut = self.cuts[factor as usize];
        self.layout.piece(factor, cut, index / cut.count, index % cut.count)
    }

    /// Keeps the blocks from being returned while the guard lives.
    ///
    /// # Panics
    /// Panics if the lease is over.
    pub(super) fn guard(&self) -> LeaseGuard<'_> {
        self.loan.guard().expect("nothing is computed with a copy that was given up")
    }

    /// Returns the factors of the ranks from `from` on as kernels read them.
    ///
    /// # Panics
    /// Panics if this is not the copy of `host`, or if a rank from `from` on is missing.
    pub(super) fn factors(&self, host: &LoraMatrix, from: usize) -> [FactorView<'_>; 2] {
        assert!(self.is_of(host), "the staged copy is of this matrix");
        assert!(self.first_rank() <= from, "the staged copy has the ranks that no head covers");
        [Factor::A, Factor::B]
            .map(|factor| FactorView::Pieces(self.cuts[factor as usize], &self.pieces[factor as usize]))
    }
}
