//! The device's copy of one adapted layer.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use super::{
    RegisteredBytes, UploadQueue,
    upload_queue::{REVOKED, UploadArrival, UploadPiece},
};
use crate::{
    cuda::{CudaError, DeviceBlockLease},
    lora::{Factor, FactorCut, LoraMatrix, MatrixLayout, Packing, PieceOffset, PieceTable, RANK_BLOCK},
};

const ENTRY_BYTES: usize = size_of::<u64>();

/// Offsets of a matrix's copy in its adapter's blocks.
#[derive(Debug)]
pub(super) struct MatrixPieces {
    pieces: PieceTable,
    /// Offset of the table: addresses of A's pieces, then of B's.
    table: PieceOffset,
}

impl MatrixPieces {
    /// Packs the matrices of an adapter; `None` if a block is too small for a table or the smallest piece of
    /// a factor. Tables come last, so that most are contiguous.
    pub(super) fn pack<'a>(
        matrices: impl IntoIterator<Item = &'a LoraMatrix>,
        packing: &mut Packing,
    ) -> Option<Vec<Self>> {
        let pieces = matrices.into_iter().map(|matrix| PieceTable::pack(matrix.layout(), packing));
        let pieces: Vec<PieceTable> = pieces.collect::<Option<_>>()?;
        let table = |pieces: PieceTable| {
            let entries = pieces.of(Factor::A).len() + pieces.of(Factor::B).len();
            Some(Self { table: packing.place(entries * ENTRY_BYTES)?, pieces })
        };
        pieces.into_iter().map(table).collect()
    }
}

/// The device's copy of a [`LoraMatrix`], with the same bytes in pieces; only leading ranks can be missing.
#[derive(Debug)]
pub struct StagedMatrix {
    lent: Arc<DeviceBlockLease>,
    layout: MatrixLayout,
    places: MatrixPieces,
    /// First rank on the device, or [`REVOKED`]. The upload queue writes it after the arrival.
    first_rank: Arc<AtomicUsize>,
    /// First rank that is enqueued or has arrived.
    given: Mutex<usize>,
}

impl StagedMatrix {
    /// Creates the copy of `host` at `places`; no rank has arrived yet.
    pub(super) fn new(lent: &Arc<DeviceBlockLease>, places: MatrixPieces, host: &LoraMatrix) -> Self {
        let layout = *host.layout();
        Self {
            lent: Arc::clone(lent),
            layout,
            places,
            first_rank: Arc::new(AtomicUsize::new(layout.rank)),
            given: Mutex::new(layout.rank),
        }
    }

    /// Returns the bytes that the next [`Self::copy_next`] enqueues, or `None` once all ranks are enqueued.
    pub(super) fn next_bytes(&self) -> Option<usize> {
        let end = *self.given();
        let first = end.checked_sub(1)? / RANK_BLOCK * RANK_BLOCK;
        Some(
            self.layout.a_bytes_before(end) - self.layout.a_bytes_before(first)
                + self.layout.b_bytes_before(end)
                - self.layout.b_bytes_before(first),
        )
    }

    /// Enqueues the copy of the last rank block that is not enqueued yet, both its A and its B part. Returns
    /// the bytes, 0 if no block is left. [`Self::first_rank`] changes only when `lane` observes the arrival.
    pub(super) fn copy_next(
        &self,
        lane: &UploadQueue,
        host: &LoraMatrix,
        registered: Option<&Arc<RegisteredBytes>>,
    ) -> Result<usize, CudaError> {
        assert!(self.is_of(host), "the staged copy is of this matrix");
        let mut given = self.given();
        let Some(last) = given.checked_sub(1) else { return Ok(0) };
        let block = last / RANK_BLOCK;
        let pieces = self.pieces(block, host);
        let first = block * RANK_BLOCK;
        let arrival = UploadArrival { first_rank: Arc::clone(&self.first_rank), rank: first };
        lane.enqueue(&pieces, registered, &self.lent, Some(arrival))?;
        *given = first;
        Ok(pieces.iter().map(|piece| piece.from.len()).sum())
    }

    /// Returns the addresses of A's pieces, then of B's: the contents of the table at [`Self::tables`].
    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> {
        let places = [Factor::A, Factor::B].into_iter().flat_map(|factor| self.places.pieces.of(factor));
        places.map(|&place| self.lent.address_of(place))
    }

    fn pieces<'a>(&self, rank_block: usize, host: &'a LoraMatrix) -> Vec<UploadPiece<'a>> {
        let mut pieces = Vec::new();
        for (factor, bytes) in [Factor::A, Factor::B].into_iter().zip(host.factors()) {
            let cut = self.cut(factor);
            for number in 0..cut.count {
                let place = self.places.pieces.of(factor)[rank_block * cut.count + number];
                let range = self.layout.piece(factor, cut, rank_block, number);
                pieces.push(UploadPiece { to: self.lent.address_of(place), from: &bytes[range] });
            }
        }
        pieces
    }

    /// Marks all ranks as missing and enqueues no more. Copies in flight may still write the blocks.
    pub(super) fn revoke(&self) {
        self.first_rank.store(REVOKED, Ordering::Relaxed);
        *self.given() = 0;
    }

    /// Returns the first rank that has arrived. Kernels enqueued from now on may read the ranks from there
    /// on.
    #[must_use]
    pub fn first_rank(&self) -> usize {
        // SYNC POINT cuda-staged-ranks: acquires the bytes of the ranks that were seen to arrive.
        self.first_rank.load(Ordering::Acquire).min(self.layout.rank)
    }

    /// Returns the bytes of both factors, arrived or not.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layout.a_bytes() + self.layout.b_bytes()
    }

    /// Returns shape and scale, and the layout of the factors on the host.
    #[must_use]
    pub fn layout(&self) -> &MatrixLayout {
        &self.layout
    }

    /// True if `host` has this copy's shape, scale and element kinds.
    #[must_use]
    pub fn is_of(&self, host: &LoraMatrix) -> bool {
        self.layout == *host.layout()
    }

    /// Returns the device addresses of the tables of A's and of B's pieces.
    pub(super) fn tables(&self) -> [u64; 2] {
        let a = self.lent.address_of(self.places.table);
        [a, a + (self.places.pieces.of(Factor::A).len() * ENTRY_BYTES) as u64]
    }

    pub(super) fn cut(&self, factor: Factor) -> FactorCut {
        self.places.pieces.cut(factor)
    }

    pub(super) fn lent(&self) -> &Arc<DeviceBlockLease> {
        &self.lent
    }

    fn given(&self) -> MutexGuard<'_, usize> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
