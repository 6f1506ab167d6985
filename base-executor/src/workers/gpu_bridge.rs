//! The bridge between a GPU and the workers' board (CaraServe §4.2).
//!
//! A GPU runs a pass without its host. The stream copies the rows of a job to the board's slab, stores the
//! job number in a word, continues with the base, and waits for another word before it adds the sums. The
//! bridge is a thread that watches the first word, owns the board, and stores the second word.
//!
//! ```text
//! engine     begin_pass   post 1  post 2 ...   (waits for the stream)                          end_pass
//! device                  x of 1 -> slab, asked = 1, base, waits for answered = 1, adds, x of 2 -> slab ..
//! bridge                                      slices of 1 -> board, helps, collects, sums, answered = 1
//! workers                                     claim, read x from the slab, sum
//! ```
//!
//! # Layout
//!
//! - Here: the engine's end, and the words. `bridge_thread`: the thread. `cuda`: the words in CUDA.
//!
//! # Why no memory is overwritten too early
//!
//! - *Slab.* The device writes job n + 1 after its wait for `answered` = n. The bridge stores that when every
//!   slice of job n is done or taken back; a worker that still reads then is late, and its result is ignored.
//! - *Sums.* The bridge writes sums of job n + 1 after it saw `asked` = n + 1, which the device stores after
//!   it read the sums of job n.
//!
//! # Why no thread waits forever
//!
//! - The device waits only for the bridge, which answers every posted job in order: computed, or uncomputed
//!   if the pass or the bridge has failed. [`Bridge::end_pass`] reports which.
//! - The bridge waits for `asked` until the pass is over, and for a worker at most the expected time of its
//!   slice.
//! - The engine waits only for the device.

mod bridge_thread;
pub(crate) mod cuda;

use std::{
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
};

use anyhow::Context as _;
use kernels::cuda::{CudaError, board::has_reached};
use model::{cpu::Compute, deltas::assist::AssistJob};
use shmproto::board::ActivationSlab;

use self::bridge_thread::BridgeThread;
use super::work_dispatcher::WorkDispatcher;

/// The words and the sums that a device shares with the bridge.
pub trait BridgeMemory: Debug + Send + Sync + 'static {
    /// Returns the number that the device stored last (acquire), so the rows written before are in the slab.
    fn asked(&self) -> u32;

    /// Returns the number that the bridge stored last.
    fn answered(&self) -> u32;

    /// Stores a number for the device (release), so it sees the sums written before.
    fn answer(&self, number: u32);

    /// Writes sums from element `at` on.
    fn write_sums(&self, at: usize, sums: &[f32]);

    /// Returns the number of elements of sums.
    fn sums_elements(&self) -> usize;
}

/// Commands to the bridge's thread, in order.
#[derive(Debug)]
enum BridgeCommand {
    /// A pass of this number begins.
    Begin(u64),
    /// A job of this number was posted.
    Sum(u32, AssistJob),
    /// The current pass is over.
    End,
}

/// State that both ends read between commands.
#[derive(Debug, Default)]
struct Traffic {
    /// Jobs up to this number will not be requested any more.
    over: AtomicU32,
    /// Latest pass with an uncomputed job.
    failed: AtomicU64,
}

/// The engine's end of a bridge. When the engine drops this end, the bridge answers all posted jobs and the
/// thread ends.
#[derive(Debug)]
pub struct Bridge<W: BridgeMemory> {
    wire: Arc<W>,
    traffic: Arc<Traffic>,
    /// `None` only during the drop.
    orders: Option<Sender<BridgeCommand>>,
    thread: Option<JoinHandle<()>>,
    x_elements: usize,
    /// Number of the latest posted job.
    posted: u32,
    /// Number of the current or latest pass.
    pass: u64,
    is_under_way: bool,
}

impl<W: BridgeMemory> Bridge<W> {
    /// Starts the bridge's thread; the threads of `compute` sum what no worker of `assistant` does.
    pub(super) fn new(
        assistant: WorkDispatcher,
        compute: Compute,
        slab: ActivationSlab,
        x_elements: usize,
        wire: W,
    ) -> anyhow::Result<Self> {
        let (wire, traffic) = (Arc::new(wire), Arc::new(Traffic::default()));
        // The words may have any value when a bridge starts.
        let posted = wire.answered();
        traffic.over.store(posted, Ordering::Relaxed);
        let (orders, incoming) = channel();
        let attendant =
            BridgeThread::new(assistant, compute, slab, incoming, Arc::clone(&wire), Arc::clone(&traffic));
        let spawned = std::thread::Builder::new().name("bridge".to_owned()).spawn(move || attendant.run());
        let thread = Some(spawned.context("cannot start the bridge thread")?);
        let orders = Some(orders);
        Ok(Self { wire, traffic, orders, thread, x_elements, posted, pass: 0, is_under_way: false })
    }

    /// Returns the memory shared with the device.
    #[must_use]
    pub fn wire(&self) -> &W {
        &self.wire
    }

    /// Begins a pass, which wakes the workers, and ends an unfinished one.
    pub fn begin_pass(&mut self) {
        if self.is_under_way {
            let _ = self.end_pass();
        }
        self.is_under_way = true;
        self.pass += 1;
        self.order(BridgeCommand::Begin(self.pass));
    }

    /// Posts a job and returns its number. See [`model::cuda::assist::DeviceAssist::post`].
    ///
    /// # Panics
    ///
    /// If no pass is active, or the job is larger than the slab or the sums.
    pub fn post(&mut self, job: AssistJob) -> u32 {
        assert!(self.is_under_way, "a job belongs to a pass");
        assert!(job.x_rows * job.width <= self.x_elements, "the rows of a job fit the slab");
        assert!(job.sums <= self.wire.sums_elements(), "the sums of a job fit their room");
        assert!(
            job.asks.iter().all(|ask| ask.first_row + ask.rows <= job.x_rows),
            "rows asked for are there"
        );
        assert!(job.asks.iter().all(|ask| ask.ask().is_some()), "what is asked for is adapted");
        self.posted = self.posted.wrapping_add(1);
        self.order(BridgeCommand::Sum(self.posted, job));
        self.posted
    }

    /// Ends the pass, and its posted jobs if it failed. See [`model::cuda::assist::DeviceAssist::end_pass`].
    ///
    /// # Errors
    ///
    /// [`CudaError::Unanswered`] if a job was not computed.
    pub fn end_pass(&mut self) -> Result<(), CudaError> {
        self.is_under_way = false;
        // SYNC POINT answered: acquires, with the answer, a failure stored before it.
        let is_answered = has_reached(self.wire.answered(), self.posted);
        let has_failed = self.traffic.failed.load(Ordering::Relaxed) == self.pass;
        self.give_up();
        self.order(BridgeCommand::End);
        if is_answered && !has_failed { Ok(()) } else { Err(CudaError::Unanswered) }
    }

    /// Marks all jobs posted so far as no longer requested.
    fn give_up(&self) {
        self.traffic.over.store(self.posted, Ordering::Relaxed);
    }

    fn order(&self, order: BridgeCommand) {
        let number = if let BridgeCommand::Sum(number, _) = order { Some(number) } else { None };
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok());
        // The thread catches its panics, so it exists. If it did not, the device would wait forever.
        if !sent {
            self.traffic.failed.store(self.pass, Ordering::Relaxed);
            number.into_iter().for_each(|number| self.wire.answer(number));
        }
    }
}

impl<W: BridgeMemory> Drop for Bridge<W> {
    fn drop(&mut self) {
        self.give_up();
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // A stream that still waits is released before any thread waits for the stream.
        self.wire.answer(self.posted);
    }
}
