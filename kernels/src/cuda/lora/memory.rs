//! An adapter's copy on the device.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use super::{
    CopyLane, RegisteredBytes,
    lane::{Arrival, Piece},
};
use crate::{
    cuda::{Cuda, CudaError, DeviceVec},
    lora::{LoraMatrix, MatrixLayout, RANK_BLOCK},
};

/// Factors start at multiples of this many bytes: a line of the device's caches.
const ALIGNMENT: usize = 128;

/// Device memory for all matrices of one adapter, which live and die together.
#[derive(Debug)]
pub struct AdapterMemory {
    bytes: DeviceVec<u8>,
    taken: AtomicUsize,
}

impl AdapterMemory {
    /// Bytes that copies of `matrices` take.
    pub fn bytes_for<'a>(matrices: impl IntoIterator<Item = &'a LoraMatrix>) -> usize {
        let factors = |matrix: &LoraMatrix| [matrix.layout().a_bytes(), matrix.layout().b_bytes()];
        let aligned = |bytes: usize| bytes.next_multiple_of(ALIGNMENT);
        matrices.into_iter().flat_map(factors).map(aligned).sum()
    }

    /// Takes `bytes` of the device's memory.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn new(cuda: &Arc<Cuda>, bytes: usize) -> Result<Arc<Self>, CudaError> {
        Ok(Arc::new(Self { bytes: DeviceVec::new(cuda, bytes)?, taken: AtomicUsize::new(0) }))
    }

    /// Bytes of all of it.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Where the next `bytes` lie on the device, which are nobody else's.
    fn take(&self, bytes: usize) -> u64 {
        let at = self.taken.fetch_add(bytes.next_multiple_of(ALIGNMENT), Ordering::Relaxed);
        assert!(at + bytes <= self.bytes.len(), "an adapter's memory was taken for all of its matrices");
        self.bytes.address_of(at)
    }
}

/// The device's copy of a [`LoraMatrix`], with the same bytes in the same order; what it lacks is a head of its ranks.
#[derive(Debug)]
pub struct StagedMatrix {
    memory: Arc<AdapterMemory>,
    layout: MatrixLayout,
    a: u64,
    b: u64,
    /// Ranks from here on are on the device. Written by the lane, when it knows that they are.
    first_rank: Arc<AtomicUsize>,
    /// Ranks from here on were given to a lane.
    given: Mutex<usize>,
}

impl StagedMatrix {
    /// Room in `memory` for `host`, with no rank in it yet.
    ///
    /// # Panics
    ///
    /// If `memory` is full: its size is [`AdapterMemory::bytes_for`] all matrices of the adapter.
    #[must_use]
    pub fn new(memory: &Arc<AdapterMemory>, host: &LoraMatrix) -> Self {
        let layout = *host.layout();
        Self {
            a: memory.take(layout.a_bytes()),
            b: memory.take(layout.b_bytes()),
            memory: Arc::clone(memory),
            layout,
            first_rank: Arc::new(AtomicUsize::new(layout.rank)),
            given: Mutex::new(layout.rank),
        }
    }

    /// Bytes that the next [`Self::copy_next`] enqueues; `None` once all ranks are on their way or here.
    #[must_use]
    pub fn next_bytes(&self) -> Option<usize> {
        let end = *self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let first = end.checked_sub(1)? / RANK_BLOCK * RANK_BLOCK;
        Some(
            self.layout.a_bytes_before(end) - self.layout.a_bytes_before(first)
                + self.layout.b_bytes_before(end)
                - self.layout.b_bytes_before(first),
        )
    }

    /// Enqueues the copy of the last rank block that is not on its way yet, A's and B's part of it, and returns their
    /// bytes: 0 if there is none. [`Self::first_rank`] moves when `lane` sees that they have arrived, not before. Waits only
    /// while the lane is full. `registered` is `host`'s memory if it could be registered; else its bytes are staged.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If `host` is not the matrix this is the copy of.
    pub fn copy_next(
        &self,
        lane: &CopyLane,
        host: &LoraMatrix,
        registered: Option<&Arc<RegisteredBytes>>,
    ) -> Result<usize, CudaError> {
        assert!(self.is_of(host), "the staged copy is of this matrix");
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let end = *given;
        let Some(last) = end.checked_sub(1) else { return Ok(0) };
        let first = last / RANK_BLOCK * RANK_BLOCK;
        let [a, b] = host.factors();
        let a_range = self.layout.a_bytes_before(first)..self.layout.a_bytes_before(end);
        let b_range = self.layout.b_bytes_before(first)..self.layout.b_bytes_before(end);
        let pieces = [
            Piece { to: self.a + a_range.start as u64, from: &a[a_range] },
            Piece { to: self.b + b_range.start as u64, from: &b[b_range] },
        ];
        let arrival = Arrival {
            memory: Arc::clone(&self.memory),
            first_rank: Arc::clone(&self.first_rank),
            rank: first,
        };
        lane.enqueue(&pieces, registered, arrival)?;
        *given = first;
        Ok(pieces.iter().map(|piece| piece.from.len()).sum())
    }

    /// Ranks from this one on are here: whoever enqueues a kernel after this has returned reads their bytes.
    #[must_use]
    pub fn first_rank(&self) -> usize {
        // SYNC POINT cuda-staged-ranks: acquires the bytes of the ranks that were seen to arrive.
        self.first_rank.load(Ordering::Acquire)
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

    /// Where A and B lie on the device.
    pub(super) fn factors(&self) -> [u64; 2] {
        [self.a, self.b]
    }

    /// What keeps them there.
    pub(super) fn memory(&self) -> &Arc<AdapterMemory> {
        &self.memory
    }
}
