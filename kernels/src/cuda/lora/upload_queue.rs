//! Uploads adapters to the device on a stream of their own, beside the compute stream.
//!
//! Several uploads are in flight at a time. Each copies all pieces of a rank block, or a part of one that
//! fits locked memory, and ends in an event. Events are reached in order, and only then are an upload's ranks
//! announced. A thread that sees the ranks may therefore enqueue a kernel that reads them on any stream.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use cudarc::driver::sys;

use super::RegisteredBytes;
use crate::cuda::{Cuda, CudaError, CudaEvent, CudaStream, DeviceBlockLease, Pinned, error::check};

/// Maximum uploads in flight. Pieces are small; a copy engine that waits for the host reaches half the rate.
const MAX_FLIGHTS: usize = 64;

/// Number of slots of locked memory, for bytes that the device cannot read directly, and bytes per slot.
const MAX_SLOTS: usize = 8;
const SLOT_BYTES: usize = 1 << 20;

pub(super) struct UploadPiece<'a> {
    pub(super) to: u64,
    pub(super) from: &'a [u8],
}

/// First rank of a matrix once its upload has arrived.
pub(super) struct UploadArrival {
    pub(super) first_rank: Arc<AtomicUsize>,
    pub(super) rank: usize,
}

/// Value of a revoked matrix's first rank, above every rank.
pub(super) const REVOKED: usize = usize::MAX;

impl UploadArrival {
    /// Publishes the rank, unless the matrix was revoked.
    fn announce(self) {
        let arrived = |now| (now != REVOKED).then_some(self.rank);
        // SYNC POINT cuda-staged-ranks: releases the ranks whose bytes are on the device.
        let _ = self.first_rank.fetch_update(Ordering::Release, Ordering::Relaxed, arrived);
    }
}

/// Copies in flight, followed by one event.
struct PendingUpload {
    event: CudaEvent,
    /// Keeps the source while the device reads it.
    _source: Option<Arc<RegisteredBytes>>,
    /// Keeps the blocks lent while the device writes them.
    _target: Arc<DeviceBlockLease>,
    /// `None` if further parts of the same rank block follow.
    arrival: Option<UploadArrival>,
}

#[derive(Default)]
struct PendingUploads {
    under_way: VecDeque<PendingUpload>,
    events: Vec<CudaEvent>,
    /// Number of slots used so far, in turn.
    staged: usize,
}

/// A queue of copies to one device, shared by the threads that copy and those that poll for arrivals.
pub struct UploadQueue {
    stream: CudaStream,
    /// [`MAX_SLOTS`] of [`SLOT_BYTES`], used in turn.
    slots: Vec<Pinned<u8>>,
    flights: Mutex<PendingUploads>,
}

impl fmt::Debug for UploadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyLane").field("under_way", &self.lock().under_way.len()).finish_non_exhaustive()
    }
}

impl UploadQueue {
    /// Creates an empty queue.
    ///
    /// # Errors
    /// Fails if the device is lost or the host cannot lock memory.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Arc<Self>, CudaError> {
        let slots = (0..MAX_SLOTS).map(|_| Pinned::new(cuda, SLOT_BYTES)).collect::<Result<_, _>>()?;
        // All events are created now: a copy allocates nothing, so no copy fails for lack of memory.
        let events = (0..MAX_FLIGHTS).map(|_| CudaEvent::new(cuda)).collect::<Result<_, _>>()?;
        let flights = Mutex::new(PendingUploads { events, ..PendingUploads::default() });
        Ok(Arc::new(Self { stream: CudaStream::new(cuda)?, slots, flights }))
    }

    /// Returns the device of the queue.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        self.stream.cuda()
    }

    /// Announces uploads that have arrived, without waiting: at the start of a pass, or while copying is
    /// idle.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn poll_arrivals(&self) -> Result<(), CudaError> {
        // The thread that holds the lock announces arrivals itself.
        let Ok(mut flights) = self.flights.try_lock() else { return Ok(()) };
        while flights.under_way.front().map_or(Ok(false), |flight| flight.event.is_reached())? {
            flights.land();
        }
        Ok(())
    }

    /// Waits for all copies and announces them.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.lock().wait_for_room(0)
    }

    /// Copies `pieces` to `target`, then announces `arrival`. Waits while too many uploads are in flight.
    pub(super) fn enqueue(
        &self,
        pieces: &[UploadPiece<'_>],
        registered: Option<&Arc<RegisteredBytes>>,
        target: &Arc<DeviceBlockLease>,
        mut arrival: Option<UploadArrival>,
    ) -> Result<(), CudaError> {
        let mut flights = self.lock();
        let Some(source) = registered else {
            let mut parts = pieces.iter().flat_map(UploadPiece::slots).peekable();
            while let Some(part) = parts.next() {
                let arrival = if parts.peek().is_none() { arrival.take() } else { None };
                self.stage(&mut flights, &part, target, arrival)?;
            }
            return Ok(());
        };
        let contained = pieces.iter().all(|piece| source.contains(piece.from));
        assert!(contained, "the registered memory is that of the matrix");
        flights.wait_for_room(MAX_FLIGHTS - 1)?;
        let mut pieces = pieces.iter();
        let copied = pieces.try_for_each(|piece| self.copy(piece.to, piece.from.as_ptr(), piece.from.len()));
        // Copies in flight keep source and target even if the rest failed.
        let arrival = arrival.filter(|_| copied.is_ok());
        self.mark(&mut flights, Some(Arc::clone(source)), target, arrival).and(copied)
    }

    /// Copies a part that fits a slot through the next slot.
    fn stage(
        &self,
        flights: &mut PendingUploads,
        part: &UploadPiece<'_>,
        target: &Arc<DeviceBlockLease>,
        arrival: Option<UploadArrival>,
    ) -> Result<(), CudaError> {
        // With fewer uploads in flight than slots, the previous upload of this slot has arrived.
        flights.wait_for_room(MAX_SLOTS - 1)?;
        let slot = &self.slots[flights.staged % MAX_SLOTS];
        flights.staged += 1;
        slot.write(0, part.from);
        self.copy(part.to, slot.host_address().cast(), part.from.len())?;
        self.mark(flights, None, target, arrival)
    }

    /// Adds an upload for the copies since the last event.
    fn mark(
        &self,
        flights: &mut PendingUploads,
        source: Option<Arc<RegisteredBytes>>,
        target: &Arc<DeviceBlockLease>,
        arrival: Option<UploadArrival>,
    ) -> Result<(), CudaError> {
        let event = flights.events.pop().map_or_else(|| CudaEvent::new(self.cuda()), Ok)?;
        let marked = event.record(&self.stream);
        let flight = PendingUpload { event, _source: source, _target: Arc::clone(target), arrival };
        flights.under_way.push_back(flight);
        marked
    }

    fn copy(&self, to: u64, from: *const u8, bytes: usize) -> Result<(), CudaError> {
        self.cuda().bind()?;
        // SAFETY: 1. `to` is a range of an adapter's blocks that no kernel reads before it is announced, and that the
        // upload keeps lent. 2. `from` is registered memory that the upload keeps and no thread writes, or a slot that
        // is written again only after the upload has arrived.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream.raw()) };
        check("copy an adapter", result)
    }

    fn lock(&self) -> MutexGuard<'_, PendingUploads> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UploadQueue {
    fn drop(&mut self) {
        // Sources and targets of copies in flight are released only after the copies are done.
        let _ = self.stream.synchronize();
    }
}

impl PendingUploads {
    /// Announces the first upload, which has arrived.
    fn land(&mut self) {
        let Some(PendingUpload { event, arrival, .. }) = self.under_way.pop_front() else { return };
        if let Some(arrival) = arrival {
            arrival.announce();
        }
        self.events.push(event);
    }

    /// Waits until at most `most` uploads are in flight, and announces all that have arrived by then.
    fn wait_for_room(&mut self, most: usize) -> Result<(), CudaError> {
        while let Some(flight) = self.under_way.front() {
            if self.under_way.len() > most {
                flight.event.synchronize()?;
            } else if !flight.event.is_reached()? {
                break;
            }
            self.land();
        }
        Ok(())
    }
}

impl<'a> UploadPiece<'a> {
    /// Splits the piece into parts that fit a slot.
    fn slots(&self) -> impl Iterator<Item = UploadPiece<'a>> + use<'a> {
        let to = self.to;
        let parts = self.from.chunks(SLOT_BYTES).enumerate();
        parts.map(move |(index, from)| UploadPiece { to: to + (index * SLOT_BYTES) as u64, from })
    }
}
