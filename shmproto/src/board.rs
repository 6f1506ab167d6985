//! The board: jobs of the executor for its LoRA workers, one to many, through shared memory.
//!
//! The executor's [`Producer`] writes rows of x once and posts slices of work. Any worker with a [`Consumer`]
//! claims a slice, sums ranks of an adapter, writes the sums into its own region and marks the slice done.
//! The executor waits for no worker: it takes back slices that are late, and later writes of a worker to such
//! a slice are ignored.
//!
//! # Layout
//!
//! - [`Board`]: the executor's handle that admits and fences workers, for any thread.
//! - [`Producer`]: the engine thread's end. [`Consumer`] and [`ClaimedSlice`]: the worker's end.
//!   [`ActivationSlab`]: the x slab for a device that writes rows itself.
//! - `shared`: state that the executor's threads share. `slice`: a slice's request and its checks.
//!   [`SliceSums`]: the result of a slice. `slice_state`: the state word of a slice. `layout`: the control
//!   region's layout.
//! - `memory`: regions, and the heap, as atomics.
//!
//! # Principles
//!
//! - A peer may write any value at any time. So each value is copied, then checked, then used, and values
//!   that the executor decides with are in its own memory.
//! - Shared memory has no locks, and neither side waits without a limit.
//! - A release and the acquire that pairs with it carry the same `SYNC POINT` name.
//!
//! `docs/PROTOCOL.md` draws the regions byte by byte.

use std::{fmt, sync::Arc};

use thiserror::Error;

use crate::atomic::Ordering;
use crate::region::RegionError;

mod activation_slab;
mod consumer;
mod layout;
mod memory;
mod producer;
mod shared;
mod slice;
mod slice_state;
mod stats;
mod sums;

pub use activation_slab::ActivationSlab;
#[cfg(not(loom))]
pub use consumer::ConsumerFds;
pub use consumer::{ClaimedSlice, Consumer, JoinError, RefusedSlices, WakeReason};
pub use layout::LAYOUT_HASH;
pub use producer::{PostError, Producer, SliceState, TakeBack, WorkerGone};
pub use slice::{MAX_RANK, SUMS_ALIGN, Slice, SliceError};
pub use stats::{BoardStats, SlotStats};
pub use sums::SliceSums;

use memory::{Control, Slab};
use shared::{AdmittedWorker, BoardShared, RegionSource};

/// Maximum number of worker slots of a board: each has a bit in one word.
pub const MAX_SEATS: usize = 64;

/// Maximum number of slices of a job.
pub const MAX_SLICES: usize = 4096;

/// Maximum number of elements in the x slab, or in a worker slot's sums region: 1 GiB of f32 values.
pub const MAX_ELEMENTS: usize = 1 << 28;

/// Sizes of a board. Both ends check them at the start, and check every slice against them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Number of f32 elements in the x slab.
    pub x_elements: usize,
    /// Number of f32 elements in each worker slot's sums region.
    pub sums_elements: usize,
    /// Maximum number of slices of a job.
    pub slices: usize,
    /// Maximum number of concurrent workers.
    pub seats: usize,
}

/// Error of a geometry with a size that no board can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a board cannot have {count} {what}: give 1 to {limit}")]
pub struct GeometryError {
    /// Name of the size that is wrong.
    pub what: &'static str,
    /// Value that the geometry has.
    pub count: usize,
    /// Largest value that is allowed.
    pub limit: usize,
}

impl Geometry {
    /// Checks every size against its limit.
    ///
    /// # Errors
    /// Returns the first size that is zero or above its limit.
    pub fn check(&self) -> Result<(), GeometryError> {
        let limits = [
            ("numbers of x", self.x_elements, MAX_ELEMENTS),
            ("sums", self.sums_elements, MAX_ELEMENTS),
            ("slices", self.slices, MAX_SLICES),
            ("seats", self.seats, MAX_SEATS),
        ];
        match limits.into_iter().find(|&(_, count, limit)| count == 0 || count > limit) {
            Some((what, count, limit)) => Err(GeometryError { what, count, limit }),
            None => Ok(()),
        }
    }

    /// Returns the offset of the slice table in the control region, in bytes.
    fn slices_offset(seats: usize) -> usize {
        layout::SEATS_OFFSET + seats * 2 * layout::LINE_BYTES
    }

    /// Returns the size of the control region in bytes.
    #[must_use]
    pub fn control_bytes(&self) -> usize {
        Self::slices_offset(self.seats) + self.slices * 2 * layout::LINE_BYTES
    }

    /// Returns the size of the x slab in bytes, rounded up to cache lines.
    #[must_use]
    pub fn x_bytes(&self) -> usize {
        (self.x_elements * 4).next_multiple_of(layout::LINE_BYTES)
    }

    /// Returns the size of a worker slot's sums region in bytes, rounded up to cache lines.
    #[must_use]
    pub fn sums_bytes(&self) -> usize {
        (self.sums_elements * 4).next_multiple_of(layout::LINE_BYTES)
    }
}

/// Index of a worker slot on the board; a slot is reused after its worker is fenced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotNumber(pub u16);

impl fmt::Display for SlotNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of a worker among all that a board ever admitted; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerNumber(u32);

impl WorkerNumber {
    /// Largest worker number: a state word has three bytes for it.
    pub const LAST: Self = Self(0x00ff_ffff);

    /// Returns the worker number; `None` for 0 and for numbers above [`WorkerNumber::LAST`].
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        (1..=Self::LAST.0).contains(&number).then_some(Self(number))
    }

    /// Returns the number as an integer.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for WorkerNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Error of creating a board or admitting a worker.
#[derive(Debug, Error)]
pub enum BoardError {
    /// A size of the geometry is out of range.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The system gave no shared memory.
    #[error("the board has no memory to share")]
    Region(#[from] RegionError),
    /// Every worker slot is taken.
    #[error("all {seats} seats are taken: fence a worker, or allow more of them")]
    Full {
        /// Number of worker slots of the board.
        seats: usize,
    },
    /// The board has used every worker number.
    #[error(
        "this board has seated {} workers and has no number for another: restart the executor",
        WorkerNumber::LAST
    )]
    Exhausted,
}

/// The executor's handle that admits and fences workers. Clones are cheap, and any thread may use one.
#[derive(Debug, Clone)]
pub struct Board {
    shared: Arc<BoardShared>,
}

impl Board {
    /// Creates a board in memory that other processes can map, and its only producer.
    ///
    /// # Errors
    /// Returns [`BoardError::Geometry`], or [`BoardError::Region`] if the system gives no memory.
    #[cfg(not(loom))]
    pub fn new(geometry: Geometry) -> Result<(Self, Producer), BoardError> {
        use crate::region::{PeerAccess, Region};
        geometry.check()?;
        let control = Region::create("holobiont-board", geometry.control_bytes(), PeerAccess::ReadWrite)?;
        let x = Region::create("holobiont-board-x", geometry.x_bytes(), PeerAccess::ReadOnly)?;
        let made = "a region is as large as was asked for";
        let control = Control::mapped(control, &geometry).expect(made);
        let x = Slab::mapped(x, geometry.x_elements).expect(made);
        Ok(Self::over(RegionSource::Memfd, geometry, control, x))
    }

    /// Creates a board for threads of this process: the same protocol without descriptors.
    ///
    /// # Errors
    /// Returns [`BoardError::Geometry`] if a size is out of range.
    pub fn in_process(geometry: Geometry) -> Result<(Self, Producer), BoardError> {
        geometry.check()?;
        let control = Control::on_heap(&geometry);
        let x = Slab::on_heap(geometry.x_elements);
        Ok(Self::over(RegionSource::InProcess, geometry, control, x))
    }

    fn over(transport: RegionSource, geometry: Geometry, control: Control, x: Slab) -> (Self, Producer) {
        consumer::write_identity(&control.header().identity, &geometry);
        let shared = Arc::new(BoardShared::new(transport, geometry, control, x));
        (Self { shared: Arc::clone(&shared) }, Producer::new(shared))
    }

    /// Returns the sizes of the board.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    /// Returns the x slab, for another writer than the producer.
    #[must_use]
    pub fn x_slab(&self) -> ActivationSlab {
        ActivationSlab::new(Arc::clone(&self.shared.x))
    }

    /// Admits a worker: takes a free worker slot and fresh memory for its sums.
    ///
    /// # Errors
    /// Returns [`BoardError::Full`], [`BoardError::Exhausted`], or [`BoardError::Region`] without memory.
    pub fn seat(&self) -> Result<ConsumerHandle, BoardError> {
        self.shared.lock().free_seat()?;
        // The memory is allocated without the lock, so that no other thread waits meanwhile.
        let sums = Arc::new(self.shared.fresh_sums()?);
        let mut seating = self.shared.lock();
        let (seat, worker) = seating.free_seat()?;
        seating.issued = worker.get();
        seating.seats[usize::from(seat.0)] =
            Some(AdmittedWorker { worker, sums: Arc::clone(&sums), tally: Arc::default() });
        self.shared.admit(seat, worker);
        drop(seating);
        Ok(ConsumerHandle { seat, worker, shared: Arc::clone(&self.shared), sums })
    }

    /// Fences a worker: its later writes are ignored, and its sums can no longer be read. Wakes the worker.
    /// Returns whether it was admitted until now.
    pub fn fence(&self, worker: WorkerNumber) -> bool {
        self.shared.fence(worker)
    }

    /// Whether a worker is admitted. The producer fences a worker that breaks the protocol.
    #[must_use]
    pub fn is_admitted(&self, worker: WorkerNumber) -> bool {
        self.shared.lock().find(worker).is_some()
    }

    /// Returns statistics of the board and its workers.
    #[must_use]
    pub fn stats(&self) -> BoardStats {
        let seating = self.shared.lock();
        let seats = seating.seats.iter().zip(self.shared.control.seats()).zip(0..);
        let seats = seats.filter_map(|((seated, entry), seat)| {
            let AdmittedWorker { worker, tally, .. } = seated.as_ref()?;
            Some(SlotStats {
                seat: SlotNumber(seat),
                worker: *worker,
                heartbeat: entry.pulse.heartbeat.load(Ordering::Relaxed),
                slices: tally.slices.get(),
                rank_rows: tally.rank_rows.get(),
                taken_back: tally.taken_back.get(),
            })
        });
        BoardStats {
            seats: seats.collect(),
            violations: self.shared.violations.get(),
            late_words: self.shared.late_words.get(),
        }
    }
}

/// Admission of one worker, with the values and descriptors that its process needs.
#[derive(Debug)]
pub struct ConsumerHandle {
    /// Worker slot of the worker.
    pub seat: SlotNumber,
    /// Number of the worker.
    pub worker: WorkerNumber,
    shared: Arc<BoardShared>,
    sums: Arc<Slab>,
}

impl ConsumerHandle {
    /// Joins the board in this process with the executor's own memory: for threads, and for tests.
    ///
    /// # Panics
    /// Panics if the board consists of regions: there the executor may not write sums, and [`Consumer::join`]
    /// maps the memory that the worker may write.
    #[must_use]
    pub fn join_in_process(self) -> Consumer {
        let Self { seat, worker, shared, sums } = self;
        assert_eq!(
            shared.transport,
            RegionSource::InProcess,
            "a board of regions is joined by its descriptors"
        );
        let (control, x) = (Arc::clone(&shared.control), Arc::clone(&shared.x));
        Consumer::over(control, x, sums, shared.geometry, seat, worker)
    }

    /// Returns the descriptors of control region, x slab and sums; `None` for an in-process board.
    #[cfg(not(loom))]
    #[must_use]
    pub fn fds(&self) -> Option<[std::os::fd::BorrowedFd<'_>; 3]> {
        let regions = [self.shared.control.region()?, self.shared.x.region()?, self.sums.region()?];
        Some(regions.map(crate::region::Region::fd))
    }

    /// Returns the sizes of control region, x slab and sums in bytes.
    #[must_use]
    pub fn bytes(&self) -> [usize; 3] {
        let geometry = &self.shared.geometry;
        [geometry.control_bytes(), geometry.x_bytes(), geometry.sums_bytes()]
    }
}
