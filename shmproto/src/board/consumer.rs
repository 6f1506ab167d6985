//! The worker's end of a board: waits for jobs, claims slices and returns sums.

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use thiserror::Error;

use super::layout::{Identity, LAYOUT_HASH, MAGIC, SliceEntry, SlotEntry};
use super::memory::{Control, Slab};
use super::slice_state::{JobNumber, SlicePhase, SliceWord};
use super::{Geometry, GeometryError, Slice, SliceError, SlotNumber, WorkerNumber};
use crate::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use crate::atomic::{fence, spin_loop};
use crate::futex;
use crate::region::RegionError;

/// Longest sleep of a worker before it checks the board again and updates its heartbeat.
pub(super) const PARK_LIMIT: Duration = Duration::from_millis(100);

/// Polls of the board between two reads of the clock.
const LOOKS_PER_TICK: u32 = 64;

/// Error of a worker that cannot join with the regions that it received.
#[derive(Debug, Error)]
pub enum JoinError {
    /// A region does not have the agreed size or seals.
    #[error("a region of the board cannot be mapped: say hello to the executor again")]
    Region(#[from] RegionError),
    /// The control region is not a board.
    #[error("the control region begins with {found:#018x} and is no board: say hello to the executor again")]
    Magic {
        /// First eight bytes of the region.
        found: u64,
    },
    /// Executor and worker were built with different layouts.
    #[error(
        "the executor's layout is {found:#018x} and this worker's {LAYOUT_HASH:#018x}: start both from one build"
    )]
    Layout {
        /// Layout hash of the executor.
        found: u64,
    },
    /// The board states a geometry that is out of range.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A region is smaller than the geometry requires.
    #[error(
        "the region of {what} has not the {bytes} bytes that the board speaks of: say hello to the executor again"
    )]
    TooSmall {
        /// Name of the region: `control`, `x` or `sums`.
        what: &'static str,
        /// Bytes that the region should have.
        bytes: usize,
    },
    /// The worker slot does not exist.
    #[error("seat {seat} is not among the board's {seats}: say hello to the executor again")]
    Seat {
        /// Worker slot that the executor gave.
        seat: SlotNumber,
        /// Number of worker slots of the board.
        seats: usize,
    },
}

/// Writes the identity of a region before another process has it.
pub(super) fn write_identity(identity: &Identity, geometry: &Geometry) {
    identity.magic.store(MAGIC, Relaxed);
    identity.layout_hash.store(LAYOUT_HASH, Relaxed);
    identity.x_elements.store(geometry.x_elements as u64, Relaxed);
    identity.sums_elements.store(geometry.sums_elements as u64, Relaxed);
    // A checked geometry is far below these limits.
    identity.slices.store(u32::try_from(geometry.slices).unwrap_or(u32::MAX), Relaxed);
    identity.seats.store(u32::try_from(geometry.seats).unwrap_or(u32::MAX), Relaxed);
}

#[cfg(not(loom))]
fn read_identity(identity: &Identity) -> Result<Geometry, JoinError> {
    let found = identity.magic.load(Relaxed);
    if found != MAGIC {
        return Err(JoinError::Magic { found });
    }
    let found = identity.layout_hash.load(Relaxed);
    if found != LAYOUT_HASH {
        return Err(JoinError::Layout { found });
    }
    let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let geometry = Geometry {
        x_elements: size(identity.x_elements.load(Relaxed)),
        sums_elements: size(identity.sums_elements.load(Relaxed)),
        slices: size(identity.slices.load(Relaxed).into()),
        seats: size(identity.seats.load(Relaxed).into()),
    };
    geometry.check()?;
    Ok(geometry)
}

/// Reason for the return of [`Consumer::wait`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeReason {
    /// A new job is posted: claim slices until none is left.
    Job,
    /// The worker is no longer admitted: leave, and request a new admission.
    Fenced,
    /// No job came for a while: do other work, then wait again.
    Rest,
}

/// Slices that a worker claimed and refused because they were malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusedSlices {
    /// Number of refused slices.
    pub slices: u64,
    /// Error of the last refused slice.
    pub last: SliceError,
}

/// A worker's end of a board, for one thread; neither allocates nor locks, with system calls only to sleep.
#[derive(Debug)]
pub struct Consumer {
    control: Arc<Control>,
    x: Arc<Slab>,
    sums: Arc<Slab>,
    geometry: Geometry,
    seat: usize,
    worker: WorkerNumber,
    /// Last job that the worker has looked at.
    seen: JobNumber,
    /// Index in the slice table where the next search begins.
    cursor: usize,
    heartbeat: u32,
    refused: Option<RefusedSlices>,
}

impl Consumer {
    /// Maps and checks the three regions that the executor handed over.
    ///
    /// # Errors
    /// Returns a [`JoinError`]; in this case nothing was written to the regions.
    #[cfg(not(loom))]
    pub fn join(fds: ConsumerFds, seat: SlotNumber, worker: WorkerNumber) -> Result<Self, JoinError> {
        use super::{MAX_ELEMENTS, MAX_SEATS, MAX_SLICES};
        use crate::region::{Access, Region};
        let least = Geometry { x_elements: 1, sums_elements: 1, slices: 1, seats: 1 };
        let most = Geometry {
            x_elements: MAX_ELEMENTS,
            sums_elements: MAX_ELEMENTS,
            slices: MAX_SLICES,
            seats: MAX_SEATS,
        };
        let control_bytes = least.control_bytes()..=most.control_bytes();
        let control = Region::map(fds.control, control_bytes, Access::ReadWrite)?;
        let too_small = |what, bytes| JoinError::TooSmall { what, bytes };
        let control =
            Control::mapped(control, &least).ok_or_else(|| too_small("control", least.control_bytes()))?;
        let geometry = read_identity(&control.header().identity)?;
        let control =
            control.resized(&geometry).ok_or_else(|| too_small("control", geometry.control_bytes()))?;
        let x = Region::map(fds.x, least.x_bytes()..=most.x_bytes(), Access::ReadOnly)?;
        let x = Slab::mapped(x, geometry.x_elements).ok_or_else(|| too_small("x", geometry.x_bytes()))?;
        let sums = Region::map(fds.sums, least.sums_bytes()..=most.sums_bytes(), Access::ReadWrite)?;
        let sums = Slab::mapped(sums, geometry.sums_elements)
            .ok_or_else(|| too_small("sums", geometry.sums_bytes()))?;
        if usize::from(seat.0) >= geometry.seats {
            return Err(JoinError::Seat { seat, seats: geometry.seats });
        }
        Ok(Self::over(Arc::new(control), Arc::new(x), Arc::new(sums), geometry, seat, worker))
    }

    pub(super) fn over(
        control: Arc<Control>,
        x: Arc<Slab>,
        sums: Arc<Slab>,
        geometry: Geometry,
        seat: SlotNumber,
        worker: WorkerNumber,
    ) -> Self {
        Self {
            control,
            x,
            sums,
            geometry,
            seat: usize::from(seat.0),
            worker,
            seen: JobNumber::NONE,
            cursor: 0,
            heartbeat: 0,
            refused: None,
        }
    }

    /// Returns the sizes of the board.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the number of this worker.
    #[must_use]
    pub fn worker(&self) -> WorkerNumber {
        self.worker
    }

    /// Returns malformed slices that were claimed, if any; they mean that the board is not to be trusted.
    #[must_use]
    pub fn refused(&self) -> Option<RefusedSlices> {
        self.refused
    }

    /// Updates the heartbeat, as [`Self::wait`] and [`Self::claim`] do; call this method in other long work.
    pub fn beat(&mut self) {
        self.heartbeat = self.heartbeat.wrapping_add(1);
        self.entry().pulse.heartbeat.store(self.heartbeat, Relaxed);
    }

    /// Waits for a job: spins up to `spin` while a pass is announced, then sleeps up to a tenth of a second.
    pub fn wait(&mut self, spin: Duration) -> WakeReason {
        // Two rounds at most, so that spurious rings of the bell cannot keep the worker from its other work.
        for _ in 0..2 {
            self.beat();
            if let Some(wake) = self.spin(spin) {
                return wake;
            }
            let started = self.park();
            if let Some(wake) = self.poll_state() {
                return wake;
            }
            if !started {
                break;
            }
        }
        WakeReason::Rest
    }

    /// Claims an open slice of the newest job whose image and module number pass `knows`.
    ///
    /// The worker calls this method until it returns `None`. A malformed slice is marked failed and counted
    /// in [`Consumer::refused`].
    pub fn claim(&mut self, knows: impl Fn(u64, u32) -> bool) -> Option<ClaimedSlice<'_>> {
        self.beat();
        if !self.is_admitted() {
            return None;
        }
        let signal = &self.control.header().signal;
        // SYNC POINT job: acquires the table that was posted before the number.
        let job = JobNumber(signal.job.load(Acquire));
        let posted = (signal.posted.load(Relaxed) as usize).min(self.geometry.slices);
        if job != self.seen {
            self.seen = job;
            // Workers start at different slices. The executor takes slices back from the end.
            self.cursor = if posted == 0 { 0 } else { self.seat % posted };
        }
        for step in 0..posted {
            let index = (self.cursor + step) % posted;
            if let Some(slice) = self.try_claim(index, job, &knows) {
                self.cursor = index + 1;
                return Some(ClaimedSlice { seat: self, job, index, slice });
            }
        }
        None
    }

    /// Claims slice `index` if it is open for `job`, known, and well-formed.
    fn try_claim(&mut self, index: usize, job: JobNumber, knows: impl Fn(u64, u32) -> bool) -> Option<Slice> {
        let entry = &self.control.slices()[index];
        let open = SliceWord { job, state: SlicePhase::Open }.encode();
        // SYNC POINT post: acquires, with Open(job), the descriptor and x.
        if entry.progress.word.load(Acquire) != open {
            return None;
        }
        let slice = entry.descriptor.copy();
        if !knows(slice.image, slice.module) {
            return None;
        }
        let claimed = SliceWord { job, state: SlicePhase::Claimed(self.worker) }.encode();
        // SYNC POINT claim: releases the copy above. The executor acquires this word, or a later one, before
        // it rewrites the descriptor. So if this exchange succeeds, the copy belongs to this job.
        entry.progress.word.compare_exchange(open, claimed, AcqRel, Relaxed).ok()?;
        if let Err(last) = slice.check(&self.geometry) {
            let slices = self.refused.map_or(0, |refused| refused.slices) + 1;
            let failed = SliceWord { job, state: SlicePhase::Failed(self.worker) }.encode();
            let _ = entry.progress.word.compare_exchange(claimed, failed, Release, Relaxed);
            self.refused = Some(RefusedSlices { slices, last });
            return None;
        }
        Some(slice)
    }

    fn entry(&self) -> &SlotEntry {
        &self.control.seats()[self.seat]
    }

    fn is_admitted(&self) -> bool {
        self.entry().desk.admitted.load(Relaxed) == self.worker.get()
    }

    /// Returns news of the board without waiting.
    fn poll_state(&mut self) -> Option<WakeReason> {
        if !self.is_admitted() {
            return Some(WakeReason::Fenced);
        }
        let job = JobNumber(self.control.header().signal.job.load(Acquire));
        (job != self.seen).then_some(WakeReason::Job)
    }

    fn spin(&mut self, limit: Duration) -> Option<WakeReason> {
        let first = self.poll_state();
        if first.is_some() || limit.is_zero() {
            return first;
        }
        let start = Instant::now();
        while self.control.header().signal.announced.load(Relaxed) != 0 && start.elapsed() < limit {
            for _ in 0..LOOKS_PER_TICK {
                spin_loop();
                if let Some(wake) = self.poll_state() {
                    return Some(wake);
                }
            }
        }
        None
    }

    /// Sleeps until the bell rings or [`PARK_LIMIT`] passes. Returns true if the bell rang and the executor
    /// has announced a pass.
    fn park(&mut self) -> bool {
        let header = self.control.header();
        let me = 1 << self.seat;
        let bell = header.signal.bell.load(Acquire);
        let announced = header.signal.announced.load(Relaxed);
        header.parked.seats.fetch_or(me, Relaxed);
        // Pairs with the fences in `Producer::wake_workers` and `BoardShared::fence`. One of two fences comes
        // first. If this one does, the other side sees the bit and rings. Otherwise this thread sees what was
        // written before the other fence.
        fence(SeqCst);
        let news = !self.is_admitted()
            || header.signal.job.load(Relaxed) != self.seen.0
            || (announced == 0 && header.signal.announced.load(Relaxed) != 0);
        if !news {
            // A ring since `bell` was read makes this call return at once.
            futex::wait(&header.signal.bell, bell, PARK_LIMIT);
        }
        header.parked.seats.fetch_and(!me, Relaxed);
        header.signal.bell.load(Relaxed) != bell && header.signal.announced.load(Relaxed) != 0
    }
}

/// Descriptors that a worker receives from the executor.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct ConsumerFds {
    /// Descriptor of the control region.
    pub control: std::os::fd::OwnedFd,
    /// Descriptor of the x slab.
    pub x: std::os::fd::OwnedFd,
    /// Descriptor of the worker's sums region.
    pub sums: std::os::fd::OwnedFd,
}

/// Slice that belongs to this worker until it is done or taken back. Dropping it unfinished marks it failed.
#[derive(Debug)]
pub struct ClaimedSlice<'a> {
    seat: &'a mut Consumer,
    job: JobNumber,
    index: usize,
    slice: Slice,
}

impl ClaimedSlice<'_> {
    /// Returns the request; every field was checked against the board.
    #[must_use]
    pub fn slice(&self) -> &Slice {
        &self.slice
    }

    /// Copies the slice's rows of x, `[rows, width]`.
    ///
    /// # Panics
    /// Panics if `x` does not have [`Slice::x_elements`] elements.
    pub fn read_x(&self, x: &mut [f32]) {
        assert_eq!(x.len(), self.slice.x_elements(), "room for the rows of x, neither more nor less");
        self.seat.x.read(self.slice.x_range().start, x);
    }

    /// Whether the executor still waits for the sums. Reading the shared word is cheap compared with a slice.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.entry().progress.word.load(Relaxed) == self.encode_word(SlicePhase::Claimed(self.seat.worker))
    }

    /// Writes the sums, `[rows, columns]`, and marks the slice done; returns whether they came in time.
    ///
    /// # Panics
    /// Panics if `sums` does not have [`Slice::sums_elements`] elements.
    pub fn done(self, sums: &[f32]) -> bool {
        let range = self.slice.sums_range();
        assert_eq!(sums.len(), range.len(), "the sums of the slice, neither more nor less");
        self.seat.sums.write(range.start, sums);
        // SYNC POINT done: releases the sums.
        let in_time = self.end(SlicePhase::Done(self.seat.worker));
        // Skips the drop, which would try to mark the slice failed; the claim owns nothing but a borrow.
        mem::forget(self);
        in_time
    }

    /// Marks the slice failed. Dropping the claim does the same.
    pub fn fail(self) {}

    fn end(&self, state: SlicePhase) -> bool {
        let claimed = self.encode_word(SlicePhase::Claimed(self.seat.worker));
        self.entry()
            .progress
            .word
            .compare_exchange(claimed, self.encode_word(state), Release, Relaxed)
            .is_ok()
    }

    fn encode_word(&self, state: SlicePhase) -> u64 {
        SliceWord { job: self.job, state }.encode()
    }

    fn entry(&self) -> &SliceEntry {
        &self.seat.control.slices()[self.index]
    }
}

impl Drop for ClaimedSlice<'_> {
    fn drop(&mut self) {
        self.end(SlicePhase::Failed(self.seat.worker));
    }
}
