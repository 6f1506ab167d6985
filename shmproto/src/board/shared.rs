//! State that the executor's threads share: the table of worker slots, admission and fencing.

use std::sync::{Arc, PoisonError};

use super::memory::{Control, Slab};
use super::stats::{Counter, WorkerCounters};
use super::{BoardError, Geometry, SlotNumber, WorkerNumber};
use crate::atomic::{AtomicU64, Mutex, MutexGuard, Ordering, fence};
use crate::futex;
use crate::region::RegionError;

/// Kind of memory under a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RegionSource {
    #[cfg(not(loom))]
    Memfd,
    InProcess,
}

#[derive(Debug)]
pub(super) struct BoardShared {
    pub(super) transport: RegionSource,
    pub(super) geometry: Geometry,
    pub(super) control: Arc<Control>,
    pub(super) x: Arc<Slab>,
    pub(super) seating: Mutex<SlotTable>,
    /// Counter of changes of `seating`, so that the producer locks the table only after a change.
    pub(super) changes: AtomicU64,
    pub(super) violations: Counter,
    pub(super) late_words: Counter,
}

#[derive(Debug, Default)]
pub(super) struct SlotTable {
    /// Last worker number that was given out.
    pub(super) issued: u32,
    pub(super) seats: Vec<Option<AdmittedWorker>>,
}

#[derive(Debug, Clone)]
pub(super) struct AdmittedWorker {
    pub(super) worker: WorkerNumber,
    pub(super) sums: Arc<Slab>,
    pub(super) tally: Arc<WorkerCounters>,
}

impl SlotTable {
    /// Returns a free worker slot and the number of its next worker.
    pub(super) fn free_seat(&self) -> Result<(SlotNumber, WorkerNumber), BoardError> {
        let free = self.seats.iter().zip(0..).find(|(seated, _)| seated.is_none());
        let (_, seat) = free.ok_or(BoardError::Full { seats: self.seats.len() })?;
        let worker = WorkerNumber::new(self.issued + 1).ok_or(BoardError::Exhausted)?;
        Ok((SlotNumber(seat), worker))
    }

    pub(super) fn find(&self, worker: WorkerNumber) -> Option<usize> {
        self.seats.iter().position(|seated| seated.as_ref().is_some_and(|it| it.worker == worker))
    }
}

impl BoardShared {
    pub(super) fn new(transport: RegionSource, geometry: Geometry, control: Control, x: Slab) -> Self {
        Self {
            transport,
            geometry,
            control: Arc::new(control),
            x: Arc::new(x),
            seating: Mutex::new(SlotTable { issued: 0, seats: vec![None; geometry.seats] }),
            changes: AtomicU64::new(0),
            violations: Counter::default(),
            late_words: Counter::default(),
        }
    }

    /// Locks the table of worker slots; every holder keeps the lock for a few instructions only.
    pub(super) fn lock(&self) -> MutexGuard<'_, SlotTable> {
        self.seating.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fresh_sums(&self) -> Result<Slab, RegionError> {
        match self.transport {
            #[cfg(not(loom))]
            RegionSource::Memfd => {
                use crate::region::{PeerAccess, Region};
                let region = Region::create(
                    "holobiont-board-sums",
                    self.geometry.sums_bytes(),
                    PeerAccess::ReadWrite,
                )?;
                let region = region.into_read_only()?.emptied_when_dropped();
                let sums = Slab::mapped(region, self.geometry.sums_elements);
                Ok(sums.expect("a region is as large as was asked for"))
            }
            RegionSource::InProcess => Ok(Slab::on_heap(self.geometry.sums_elements)),
        }
    }

    /// Writes a worker's admission to shared memory while the table is locked.
    pub(super) fn admit(&self, seat: SlotNumber, worker: WorkerNumber) {
        let entry = &self.control.seats()[usize::from(seat.0)];
        entry.pulse.heartbeat.store(0, Ordering::Relaxed);
        self.control.header().parked.seats.fetch_and(!(1 << seat.0), Ordering::Relaxed);
        // SYNC POINT seating: releases the words above, which are read only after this count.
        self.changes.fetch_add(1, Ordering::Release);
        entry.desk.admitted.store(worker.get(), Ordering::Release);
    }

    pub(super) fn fence(&self, worker: WorkerNumber) -> bool {
        let mut seating = self.lock();
        let Some(seat) = seating.find(worker) else { return false };
        let gone = seating.seats[seat].take();
        self.changes.fetch_add(1, Ordering::Release);
        self.control.seats()[seat].desk.admitted.store(0, Ordering::Relaxed);
        drop(seating);
        // Unmapping takes a while, so it happens without the lock.
        drop(gone);
        let header = self.control.header();
        // Pairs with the fence in `Consumer::park`: the worker sees that it is fenced, or the bell wakes it.
        fence(Ordering::SeqCst);
        header.parked.seats.fetch_and(!(1 << seat), Ordering::Relaxed);
        header.signal.bell.fetch_add(1, Ordering::Relaxed);
        futex::wake(&header.signal.bell, u32::MAX >> 1);
        true
    }
}
