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

/// Bytes of a table's entry: an address.
const ENTRY_BYTES: usize = size_of::<u64>();

/// Where a matrix's copy lies in its adapter's blocks.
#[derive(Debug)]
pub(super) struct MatrixPieces {
    pieces: PieceTable,
    /// Of A's pieces' addresses, then of B's.
    table: PieceOffset,
}

impl MatrixPieces {
    /// Packs the matrices of an adapter; `None` if a block does not hold a table, or the least piece of a factor. Tables come
    /// last, so that most lie side by side.
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

/// The device's copy of a [`LoraMatrix`], with the same bytes in pieces; what it lacks is a head of its ranks.
#[derive(Debug)]
pub struct StagedMatrix {
    lent: Arc<DeviceBlockLease>,
    layout: MatrixLayout,
    places: MatrixPieces,
    /// Ranks from here on are on the device, or [`REVOKED`]. Written by the lane, when it knows that they are.
    first_rank: Arc<AtomicUsize>,
    /// Ranks from here on were given to a lane.
    given: Mutex<usize>,
}

impl StagedMatrix {
    /// Room for `host` at `places`, with no rank in it yet.
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

    /// Bytes that the next [`Self::copy_next`] enqueues; `None` once all ranks are on their way or here.
    pub(super) fn next_bytes(&self) -> Option<usize> {
        let end = *self.given();
        let first = end.checked_sub(1)? / RANK_BLOCK * RANK_BLOCK;
        Some(
            self.layout.a_bytes_before(end) - self.layout.a_bytes_before(first)
                + self.layout.b_bytes_before(end)
                - self.layout.b_bytes_before(first),
        )
    }

    /// Enqueues the copy of the last rank block that is not on its way yet, A's and B's part of it, and returns their
    /// bytes: 0 if there is none. [`Self::first_rank`] moves when `lane` sees that they have arrived, not before.
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

    /// The addresses of A's pieces, and then of B's: what the table at [`Self::tables`] holds.
    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> {
        let places = [Factor::A, Factor::B].into_iter().flat_map(|factor| self.places.pieces.of(factor));
        places.map(|&place| self.lent.address_of(place))
    }

    /// Where the parts of a rank block come from, and where they go.
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

    /// Has nothing read from here on, and nothing enqueued: what is under way may still be written.
    pub(super) fn revoke(&self) {
        self.first_rank.store(REVOKED, Ordering::Relaxed);
        *self.given() = 0;
    }

    /// Ranks from this one on are here: whoever enqueues a kernel after this has returned reads their bytes.
    #[must_use]
    pub fn first_rank(&self) -> usize {
        // SYNC POINT cuda-staged-ranks: acquires the bytes of the ranks that were seen to arrive.
        self.first_rank.load(Ordering::Acquire).min(self.layout.rank)
    }

    /// Bytes of both factors, whether or not they are here.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layout.a_bytes() + self.layout.b_bytes()
    }

    /// Shape and scale, and where the factors lie on the host.
    #[must_use]
    pub fn layout(&self) -> &MatrixLayout {
        &self.layout
    }

    /// True if `host` has this copy's shape, scale and kinds.
    #[must_use]
    pub fn is_of(&self, host: &LoraMatrix) -> bool {
        self.layout == *host.layout()
    }

    /// Where the tables of A's and of B's pieces lie on the device.
    pub(super) fn tables(&self) -> [u64; 2] {
        let a = self.lent.address_of(self.places.table);
        [a, a + (self.places.pieces.of(Factor::A).len() * ENTRY_BYTES) as u64]
    }

    /// How a factor is cut.
    pub(super) fn cut(&self, factor: Factor) -> FactorCut {
        self.places.pieces.cut(factor)
    }

    /// What keeps it there.
    pub(super) fn lent(&self) -> &Arc<DeviceBlockLease> {
        &self.lent
    }

    fn given(&self) -> MutexGuard<'_, usize> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
