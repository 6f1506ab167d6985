//! What the executor's threads have in common: who sits where, and how somebody comes and goes.

use std::sync::{Arc, PoisonError};

use super::memory::{Control, Slab};
use super::stats::{Counter, WorkerCounters};
use super::{BoardError, Geometry, SlotNumber, WorkerNumber};
use crate::atomic::{AtomicU64, Mutex, MutexGuard, Ordering, fence};
use crate::futex;
use crate::region::RegionError;

/// Where the regions of a board are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RegionSource {
    #[cfg(not(loom))]
    Memfd,
    InProcess,
}

/// What the executor's threads have in common.
#[derive(Debug)]
pub(super) struct BoardShared {
    pub(super) transport: RegionSource,
    pub(super) geometry: Geometry,
    pub(super) control: Arc<Control>,
    pub(super) x: Arc<Slab>,
    pub(super) seating: Mutex<SlotTable>,
    /// Moves with every change of `seating`, so that the poster looks there only then.
    pub(super) changes: AtomicU64,
    pub(super) violations: Counter,
    pub(super) late_words: Counter,
}

/// Who sits where.
#[derive(Debug, Default)]
pub(super) struct SlotTable {
    /// The last worker number that was given out.
    pub(super) issued: u32,
    pub(super) seats: Vec<Option<AdmittedWorker>>,
}

/// An admitted worker, as the executor knows it.
#[derive(Debug, Clone)]
pub(super) struct AdmittedWorker {
    pub(super) worker: WorkerNumber,
    pub(super) sums: Arc<Slab>,
    pub(super) tally: Arc<WorkerCounters>,
}

impl SlotTable {
    /// A seat nobody has, and the number its worker would get.
    pub(super) fn free_seat(&self) -> Result<(SlotNumber, WorkerNumber), BoardError> {
        let free = self.seats.iter().zip(0..).find(|(seated, _)| seated.is_none());
        let (_, seat) = free.ok_or(BoardError::Full { seats: self.seats.len() })?;
        let worker = WorkerNumber::new(self.issued + 1).ok_or(BoardError::Exhausted)?;
        Ok((SlotNumber(seat), worker))
    }

    /// Where a worker sits.
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

    /// Held for a few instructions only, by whoever holds it.
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

    /// Writes a worker's admission down, with the seating locked.
    pub(super) fn admit(&self, seat: SlotNumber, worker: WorkerNumber) {
        let entry = &self.control.seats()[usize::from(seat.0)];
        entry.pulse.heartbeat.store(0, Ordering::Relaxed);
        self.control.header().parked.seats.fetch_and(!(1 << seat.0), Ordering::Relaxed);
        // SYNC POINT seating: releases the words above: they are looked up only after this count was read.
        self.changes.fetch_add(1, Ordering::Release);
        entry.desk.admitted.store(worker.get(), Ordering::Release);
    }

    /// See [`super::Board::fence`].
    pub(super) fn fence(&self, worker: WorkerNumber) -> bool {
        let mut seating = self.lock();
        let Some(seat) = seating.find(worker) else { return false };
        let gone = seating.seats[seat].take();
        self.changes.fetch_add(1, Ordering::Release);
        self.control.seats()[seat].desk.admitted.store(0, Ordering::Relaxed);
        drop(seating);
        // Unmapping takes a while, and is nobody else's business.
        drop(gone);
        let header = self.control.header();
        // Pairs with the fence in `Consumer::park`: either the worker sees that it is fenced, or the bell wakes it.
        fence(Ordering::SeqCst);
        header.parked.seats.fetch_and(!(1 << seat), Ordering::Relaxed);
        header.signal.bell.fetch_add(1, Ordering::Relaxed);
        futex::wake(&header.signal.bell, u32::MAX >> 1);
        true
    }
}
