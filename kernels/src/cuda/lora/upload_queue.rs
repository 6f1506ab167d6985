//! Where adapters' bytes travel to the device: a stream of their own, beside the one that computes.
//!
//! Several flights are under way at a time, each with a mark behind it: all pieces of a rank block, or a part of one that
//! goes through locked memory. Marks are reached in order; only then are the ranks of a flight announced, so whoever sees
//! them may enqueue a kernel that reads them on any stream.

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

/// Most flights under way. Pieces are small, and a copy engine that has waited for the host moves half as much.
const MAX_FLIGHTS: usize = 64;

/// Slots of locked memory, through which bytes travel that the device cannot read where they are, and bytes of each.
const MAX_SLOTS: usize = 8;
const SLOT_BYTES: usize = 1 << 20;

/// Some bytes and where they go.
pub(super) struct UploadPiece<'a> {
    pub(super) to: u64,
    pub(super) from: &'a [u8],
}

/// What is true once the bytes are there.
pub(super) struct UploadArrival {
    pub(super) first_rank: Arc<AtomicUsize>,
    pub(super) rank: usize,
}

/// What a matrix's first rank is once nothing is to be read any more: no rank is as large.
pub(super) const REVOKED: usize = usize::MAX;

impl UploadArrival {
    /// Tells it, unless the matrix was revoked.
    fn announce(self) {
        let arrived = |now| (now != REVOKED).then_some(self.rank);
        // SYNC POINT cuda-staged-ranks: releases the ranks whose bytes are on the device.
        let _ = self.first_rank.fetch_update(Ordering::Release, Ordering::Relaxed, arrived);
    }
}

/// Copies under way with one mark behind them.
struct PendingUpload {
    event: CudaEvent,
    /// Kept while the device reads it.
    _source: Option<Arc<RegisteredBytes>>,
    /// Kept lent while the device writes it.
    _target: Arc<DeviceBlockLease>,
    /// `None` while more of the same block follows.
    arrival: Option<UploadArrival>,
}

#[derive(Default)]
struct PendingUploads {
    under_way: VecDeque<PendingUpload>,
    /// Marks to be used again.
    events: Vec<CudaEvent>,
    /// How many slots were taken, in turn.
    staged: usize,
}

/// A queue of copies to one device. Shared by all who copy, and by who looks whether something has arrived.
pub struct UploadQueue {
    stream: CudaStream,
    /// [`MAX_SLOTS`] of [`SLOT_BYTES`]: flights take them in turn.
    slots: Vec<Pinned<u8>>,
    flights: Mutex<PendingUploads>,
}

impl fmt::Debug for UploadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyLane").field("under_way", &self.lock().under_way.len()).finish_non_exhaustive()
    }
}

impl UploadQueue {
    /// A lane without copies.
    ///
    /// # Errors
    ///
    /// The device is lost, or the host has no memory that may be locked.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Arc<Self>, CudaError> {
        let slots = (0..MAX_SLOTS).map(|_| Pinned::new(cuda, SLOT_BYTES)).collect::<Result<_, _>>()?;
        // All marks at once: a copy takes no memory, so none fails for want of it.
        let events = (0..MAX_FLIGHTS).map(|_| CudaEvent::new(cuda)).collect::<Result<_, _>>()?;
        let flights = Mutex::new(PendingUploads { events, ..PendingUploads::default() });
        Ok(Arc::new(Self { stream: CudaStream::new(cuda)?, slots, flights }))
    }

    /// The device.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        self.stream.cuda()
    }

    /// Announces what has arrived, without waiting: at the beginning of a pass, say, or while a copy engine is idle.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn poll_arrivals(&self) -> Result<(), CudaError> {
        // Whoever holds the lock announces arrivals itself.
        let Ok(mut flights) = self.flights.try_lock() else { return Ok(()) };
        while flights.under_way.front().map_or(Ok(false), |flight| flight.event.is_reached())? {
            flights.land();
        }
        Ok(())
    }

    /// Waits for all copies, and announces them.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.lock().wait_for_room(0)
    }

    /// Copies `pieces` to `target`, then announces `arrival`. Waits while too many copies are under way.
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
        // What is under way keeps its ends, although the rest is not.
        let arrival = arrival.filter(|_| copied.is_ok());
        self.mark(&mut flights, Some(Arc::clone(source)), target, arrival).and(copied)
    }

    /// Copies a part that fits a slot through the next one.
    fn stage(
        &self,
        flights: &mut PendingUploads,
        part: &UploadPiece<'_>,
        target: &Arc<DeviceBlockLease>,
        arrival: Option<UploadArrival>,
    ) -> Result<(), CudaError> {
        // The flight that had the slot last has landed then: fewer than all slots are under way.
        flights.wait_for_room(MAX_SLOTS - 1)?;
        let slot = &self.slots[flights.staged % MAX_SLOTS];
        flights.staged += 1;
        slot.write(0, part.from);
        self.copy(part.to, slot.host_address().cast(), part.from.len())?;
        self.mark(flights, None, target, arrival)
    }

    /// A flight of what was copied since the last one.
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
        // SAFETY: 1. `to` is a range of an adapter's blocks that nobody reads before it is announced, and that the flight
        // keeps lent. 2. `from` is registered memory that the flight keeps and nobody writes, or a slot that is written next
        // when the flight has landed.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream.raw()) };
        check("copy an adapter", result)
    }

    fn lock(&self) -> MutexGuard<'_, PendingUploads> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UploadQueue {
    fn drop(&mut self) {
        // What is read and written by copies under way is given back only when they are done.
        let _ = self.stream.synchronize();
    }
}

impl PendingUploads {
    /// The first flight is over.
    fn land(&mut self) {
        let Some(PendingUpload { event, arrival, .. }) = self.under_way.pop_front() else { return };
        if let Some(arrival) = arrival {
            arrival.announce();
        }
        self.events.push(event);
    }

    /// Waits until at most `most` flights are under way, and lets all land that are over by then.
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
    /// Cut so that each part fits a slot.
    fn slots(&self) -> impl Iterator<Item = UploadPiece<'a>> + use<'a> {
        let to = self.to;
        let parts = self.from.chunks(SLOT_BYTES).enumerate();
        parts.map(move |(index, from)| UploadPiece { to: to + (index * SLOT_BYTES) as u64, from })
    }
}
