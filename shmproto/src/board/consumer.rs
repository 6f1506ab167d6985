//! The worker's end of a board.

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

/// Longest time a worker sleeps without looking around and giving a sign of life.
pub(super) const PARK_LIMIT: Duration = Duration::from_millis(100);

/// Looks at the board between two looks at the clock.
const LOOKS_PER_TICK: u32 = 64;

/// Why a worker cannot sit down with what it was given.
#[derive(Debug, Error)]
pub enum JoinError {
    /// A region is not what was agreed.
    #[error("a region of the board cannot be mapped: say hello to the executor again")]
    Region(#[from] RegionError),
    /// The region is no board.
    #[error("the control region begins with {found:#018x} and is no board: say hello to the executor again")]
    Magic {
        /// What it begins with.
        found: u64,
    },
    /// The other side was built from another layout.
    #[error(
        "the executor's layout is {found:#018x} and this worker's {LAYOUT_HASH:#018x}: start both from one build"
    )]
    Layout {
        /// The executor's hash.
        found: u64,
    },
    /// The board says an impossible size of itself.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A region is smaller than the board's geometry says.
    #[error(
        "the region of {what} has not the {bytes} bytes that the board speaks of: say hello to the executor again"
    )]
    TooSmall {
        /// What lies in it: `control`, `x` or `sums`.
        what: &'static str,
        /// Bytes it should have.
        bytes: usize,
    },
    /// There is no such seat.
    #[error("seat {seat} is not among the board's {seats}: say hello to the executor again")]
    Seat {
        /// The seat that was given.
        seat: SlotNumber,
        /// How many there are.
        seats: usize,
    },
}

/// Says what a region is, before anybody else has it.
pub(super) fn write_identity(identity: &Identity, geometry: &Geometry) {
    identity.magic.store(MAGIC, Relaxed);
    identity.layout_hash.store(LAYOUT_HASH, Relaxed);
    identity.x_elements.store(geometry.x_elements as u64, Relaxed);
    identity.sums_elements.store(geometry.sums_elements as u64, Relaxed);
    // A checked geometry is far below these limits.
    identity.slices.store(u32::try_from(geometry.slices).unwrap_or(u32::MAX), Relaxed);
    identity.seats.store(u32::try_from(geometry.seats).unwrap_or(u32::MAX), Relaxed);
}

/// Copies what a region says of itself, and checks it.
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

/// Why [`Consumer::wait`] came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeReason {
    /// There is a job that was not looked at: claim slices until there are none.
    Job,
    /// The worker is not admitted any more: leave, and say hello again.
    Fenced,
    /// Nothing for a while: time for other business, then wait again.
    Rest,
}

/// What a worker was asked to do and could not understand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusedSlices {
    /// How many slices.
    pub slices: u64,
    /// What was wrong with the last one.
    pub last: SliceError,
}

/// A worker's place at a board. One thread; nothing here allocates, locks, or calls the system, but for sleeping.
#[derive(Debug)]
pub struct Consumer {
    control: Arc<Control>,
    x: Arc<Slab>,
    sums: Arc<Slab>,
    geometry: Geometry,
    seat: usize,
    worker: WorkerNumber,
    /// The job that was looked at last.
    seen: JobNumber,
    /// Where in the table the next look begins.
    cursor: usize,
    heartbeat: u32,
    refused: Option<RefusedSlices>,
}

impl Consumer {
    /// Sits down with the three regions that the executor handed over, after checking them.
    ///
    /// # Errors
    ///
    /// See [`JoinError`]; nothing was written then.
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

    /// How large the board is.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Which worker this is.
    #[must_use]
    pub fn worker(&self) -> WorkerNumber {
        self.worker
    }

    /// Slices that were claimed and made no sense, if there were any: the board is not to be trusted then.
    #[must_use]
    pub fn refused(&self) -> Option<RefusedSlices> {
        self.refused
    }

    /// Gives a sign of life. Waiting and claiming do so too; this is for other long work.
    pub fn beat(&mut self) {
        self.heartbeat = self.heartbeat.wrapping_add(1);
        self.entry().pulse.heartbeat.store(self.heartbeat, Relaxed);
    }

    /// Waits for a job that was not looked at: spins for `spin` at most while the executor has announced one, then
    /// sleeps for a tenth of a second at most.
    pub fn wait(&mut self, spin: Duration) -> WakeReason {
        // A bell that rings without reason would hold the worker from its other business: so twice, and no more.
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

    /// Claims a slice of the newest job whose adapter and matrix it `knows`, if there is an open one.
    ///
    /// Meant to be called until there is none. A slice that makes no sense is failed and counted in
    /// [`Consumer::refused`].
    pub fn claim(&mut self, knows: impl Fn(u64, u32) -> bool) -> Option<ClaimedSlice<'_>> {
        self.beat();
        if !self.is_admitted() {
            return None;
        }
        let signal = &self.control.header().signal;
        // SYNC POINT job: acquires what was posted before the number.
        let job = JobNumber(signal.job.load(Acquire));
        let posted = (signal.posted.load(Relaxed) as usize).min(self.geometry.slices);
        if job != self.seen {
            self.seen = job;
            // Workers begin apart from each other. The executor takes back from the end.
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

    /// Claims one slice if it is open for the job, known, and makes sense.
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
        // SYNC POINT claim: releases the copy above. Who rewrites the descriptor acquires this word, or one after it,
        // first, so if this succeeds the copy was the job's own.
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

    /// What there is to know without waiting.
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

    /// Sleeps until the bell rings; says whether a pass that needs workers is under way after that.
    fn park(&mut self) -> bool {
        let header = self.control.header();
        let me = 1 << self.seat;
        let bell = header.signal.bell.load(Acquire);
        let announced = header.signal.announced.load(Relaxed);
        header.parked.seats.fetch_or(me, Relaxed);
        // Pairs with the fences in `Producer::wake_workers` and `Shared::fence`. Of two fences one is first. If it is this one,
        // the other side sees the bit and rings. If it is the other, what was written before it is seen here.
        fence(SeqCst);
        let news = !self.is_admitted()
            || header.signal.job.load(Relaxed) != self.seen.0
            || (announced == 0 && header.signal.announced.load(Relaxed) != 0);
        if !news {
            // If it rang since `bell` was read, this returns at once.
            futex::wait(&header.signal.bell, bell, PARK_LIMIT);
        }
        header.parked.seats.fetch_and(!me, Relaxed);
        header.signal.bell.load(Relaxed) != bell && header.signal.announced.load(Relaxed) != 0
    }
}

/// The descriptors that a worker is given.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct ConsumerFds {
    /// Of the control region.
    pub control: std::os::fd::OwnedFd,
    /// Of the x slab.
    pub x: std::os::fd::OwnedFd,
    /// Of its sums.
    pub sums: std::os::fd::OwnedFd,
}

/// A slice that is this worker's until it is done, or taken back. Dropped without an end, it is failed.
#[derive(Debug)]
pub struct ClaimedSlice<'a> {
    seat: &'a mut Consumer,
    job: JobNumber,
    index: usize,
    slice: Slice,
}

impl ClaimedSlice<'_> {
    /// What to do; every field was checked against the board.
    #[must_use]
    pub fn slice(&self) -> &Slice {
        &self.slice
    }

    /// Copies the rows of x out: `[rows, width]`.
    ///
    /// # Panics
    ///
    /// If `x` has not [`Slice::x_elements`] numbers.
    pub fn read_x(&self, x: &mut [f32]) {
        assert_eq!(x.len(), self.slice.x_elements(), "room for the rows of x, neither more nor less");
        self.seat.x.read(self.slice.x_range().start, x);
    }

    /// Whether anybody still waits for the sums. Reading a shared word costs little beside a slice.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.entry().progress.word.load(Relaxed) == self.encode_word(SlicePhase::Claimed(self.seat.worker))
    }

    /// Hands the sums over, `[rows, columns]`; says whether they came in time.
    ///
    /// # Panics
    ///
    /// If there are not [`Slice::sums_elements`] of them.
    pub fn done(self, sums: &[f32]) -> bool {
        let range = self.slice.sums_range();
        assert_eq!(sums.len(), range.len(), "the sums of the slice, neither more nor less");
        self.seat.sums.write(range.start, sums);
        // SYNC POINT done: releases the sums.
        let in_time = self.end(SlicePhase::Done(self.seat.worker));
        // It holds nothing but a borrow, and the word needs no second look.
        mem::forget(self);
        in_time
    }

    /// Gives the slice back undone. Dropping the claim does the same.
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
