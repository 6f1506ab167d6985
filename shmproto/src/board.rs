//! The board: jobs of the executor for its LoRA workers, one to many, through shared memory.
//!
//! The executor's [`Producer`] writes rows of x once and pins up slices of work; whichever worker has a [`Consumer`] claims a
//! slice, sums ranks of an adapter, puts the sums into its own region and says so. The executor waits for no worker: it
//! takes back what it does not want to wait for, and what a worker does to such a slice afterwards counts for nothing.
//!
//! # Layout
//!
//! - [`Board`]: the executor's handle for seating and fencing workers; any thread.
//! - [`Producer`]: the engine thread's end. [`Consumer`] and [`ClaimedSlice`]: the worker's end. [`ActivationSlab`]: where a device writes rows itself.
//! - `shared`: what the executor's threads have in common. `slice`: what a slice asks for, and its checks. [`SliceSums`]: what came of it. `slice_state`: a slice's state. `layout`: what lies where.
//! - `memory`: regions, and the heap, as atomics.
//!
//! # Principles
//!
//! - A peer writes what it likes, whenever it likes. So what is read is copied, then checked, then used, and what the
//!   executor decides with stands in its own memory.
//! - No locks in shared memory, and no wait without a limit on either side.
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

/// Most seats a board may have: each has a bit in one word.
pub const MAX_SEATS: usize = 64;

/// Most slices a job may have.
pub const MAX_SLICES: usize = 4096;

/// Most numbers in the x slab, or in a seat's region: 1 GiB of them.
pub const MAX_ELEMENTS: usize = 1 << 28;

/// How large a board is. Both ends check it when they begin, and every slice against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Numbers in the x slab.
    pub x_elements: usize,
    /// Numbers in each seat's region of sums.
    pub sums_elements: usize,
    /// Most slices of a job.
    pub slices: usize,
    /// Most workers at once.
    pub seats: usize,
}

/// Why no board can have this geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a board cannot have {count} {what}: give 1 to {limit}")]
pub struct GeometryError {
    /// Of what.
    pub what: &'static str,
    /// How many were asked for.
    pub count: usize,
    /// Most there may be.
    pub limit: usize,
}

impl Geometry {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// The first that is none or above its limit.
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

    /// Where the slice table begins in the control region.
    fn slices_offset(seats: usize) -> usize {
        layout::SEATS_OFFSET + seats * 2 * layout::LINE_BYTES
    }

    /// Bytes of the control region.
    #[must_use]
    pub fn control_bytes(&self) -> usize {
        Self::slices_offset(self.seats) + self.slices * 2 * layout::LINE_BYTES
    }

    /// Bytes of the x slab: whole cache lines.
    #[must_use]
    pub fn x_bytes(&self) -> usize {
        (self.x_elements * 4).next_multiple_of(layout::LINE_BYTES)
    }

    /// Bytes of a seat's region of sums: whole cache lines.
    #[must_use]
    pub fn sums_bytes(&self) -> usize {
        (self.sums_elements * 4).next_multiple_of(layout::LINE_BYTES)
    }
}

/// Which place at the board; a new worker may get one that another had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotNumber(pub u16);

impl fmt::Display for SlotNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of a worker, of all that were ever seated at a board; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerNumber(u32);

impl WorkerNumber {
    /// The last one there is: three bytes in a state word.
    pub const LAST: Self = Self(0x00ff_ffff);

    /// A worker's number; none for 0 and for what is past [`WorkerNumber::LAST`].
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        (1..=Self::LAST.0).contains(&number).then_some(Self(number))
    }

    /// Its number.
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

/// Why the board does not do what it was asked.
#[derive(Debug, Error)]
pub enum BoardError {
    /// The geometry is wrong.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Memory could not be shared.
    #[error("the board has no memory to share")]
    Region(#[from] RegionError),
    /// Everybody has a seat.
    #[error("all {seats} seats are taken: fence a worker, or allow more of them")]
    Full {
        /// How many seats there are.
        seats: usize,
    },
    /// Every worker number was used.
    #[error(
        "this board has seated {} workers and has no number for another: restart the executor",
        WorkerNumber::LAST
    )]
    Exhausted,
}

/// The executor's handle on the board: who may sit there. Cheap to clone; any thread.
#[derive(Debug, Clone)]
pub struct Board {
    shared: Arc<BoardShared>,
}

impl Board {
    /// A board in memory that other processes can be given, and the one end that posts jobs.
    ///
    /// # Errors
    ///
    /// [`BoardError::Geometry`], or [`BoardError::Region`] if there is no memory.
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

    /// A board for threads of this process only: the same protocol without descriptors.
    ///
    /// # Errors
    ///
    /// [`BoardError::Geometry`].
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

    /// How large the board is.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    /// The x slab, for somebody else to write.
    #[must_use]
    pub fn x_slab(&self) -> ActivationSlab {
        ActivationSlab::new(Arc::clone(&self.shared.x))
    }

    /// Gives a worker a seat, with fresh memory for its sums. It is admitted from now on.
    ///
    /// # Errors
    ///
    /// [`BoardError::Full`], [`BoardError::Exhausted`], or [`BoardError::Region`] if there is no memory.
    pub fn seat(&self) -> Result<ConsumerHandle, BoardError> {
        self.shared.lock().free_seat()?;
        // Made while nobody waits for the lock.
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

    /// Ends a worker's admission: what it does from now on counts for nothing, and its sums are gone. Wakes it.
    /// Says whether it was admitted until now.
    pub fn fence(&self, worker: WorkerNumber) -> bool {
        self.shared.fence(worker)
    }

    /// Whether a worker is admitted. One that broke the protocol was fenced by the poster.
    #[must_use]
    pub fn is_admitted(&self, worker: WorkerNumber) -> bool {
        self.shared.lock().find(worker).is_some()
    }

    /// What happens at the board.
    #[must_use]
    pub fn figures(&self) -> BoardStats {
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

/// A seat for a worker: what its process must be given.
#[derive(Debug)]
pub struct ConsumerHandle {
    /// Where it sits.
    pub seat: SlotNumber,
    /// Which worker it is.
    pub worker: WorkerNumber,
    shared: Arc<BoardShared>,
    sums: Arc<Slab>,
}

impl ConsumerHandle {
    /// Sits down in this process, sharing the executor's own memory: for threads, and for tests.
    ///
    /// # Panics
    ///
    /// If the board is one of regions: there the executor may not write sums, and [`Consumer::join`] maps what the worker may.
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

    /// The descriptors of control region, x slab and sums, to be handed over; none for a board of one process.
    #[cfg(not(loom))]
    #[must_use]
    pub fn fds(&self) -> Option<[std::os::fd::BorrowedFd<'_>; 3]> {
        let regions = [self.shared.control.region()?, self.shared.x.region()?, self.sums.region()?];
        Some(regions.map(crate::region::Region::fd))
    }

    /// Bytes of control region, x slab and sums.
    #[must_use]
    pub fn bytes(&self) -> [usize; 3] {
        let geometry = &self.shared.geometry;
        [geometry.control_bytes(), geometry.x_bytes(), geometry.sums_bytes()]
    }
}
