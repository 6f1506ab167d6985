//! Between a device that computes by itself and the workers' board (CaraServe §4.2).
//!
//! A device goes through a pass without its host: it puts the rows that are asked for into the board's slab, says so in
//! a word, goes on with the base, and waits, in the order of its stream, for another word before it adds the sums. The
//! bridge is who watches the one word and writes the other: a thread that has the board to itself.
//!
//! ```text
//! engine     begin_pass   post 1  post 2 ...   (waits for the stream)                          end_pass
//! device                  x of 1 -> slab, asked = 1, base, waits for answered = 1, adds, x of 2 -> slab, asked = 2 ..
//! bridge                                      slices of 1 -> board, helps, collects, sums, answered = 1
//! workers                                     claim, read x from the slab, sum
//! ```
//!
//! # Layout
//!
//! - Here: the engine's end, and the words. `bridge_thread`: the thread. `cuda`: the words as CUDA has them.
//!
//! # Why nothing is overwritten too early
//!
//! - *Slab.* The device writes job n + 1 there behind, in its stream, the wait for `answered` = n, which is stored when
//!   every slice of job n is done or taken back. A worker that still reads then is late: its word is not believed.
//! - *Sums.* Those of job n + 1 are written after `asked` = n + 1 was seen, which the device stores behind its reading
//!   of the sums of job n.
//!
//! # Why nobody waits for ever
//!
//! - The device waits for the bridge alone, and every job that was posted is answered, in order: computed, or, where the
//!   pass has failed or the bridge has, unseen. [`Bridge::end_pass`] tells which.
//! - The bridge waits for `asked` until it is told that the pass is over, and for a worker as long as its slice should take.
//! - The engine waits for the device alone.

mod bridge_thread;
pub mod cuda;

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

/// The words, and the sums, that a device shares with the bridge.
pub trait BridgeMemory: Debug + Send + Sync + 'static {
    /// The number that the device stored last, acquired: the rows it wrote before are in the slab.
    fn asked(&self) -> u32;

    /// The number that the bridge stored last.
    fn answered(&self) -> u32;

    /// Stores a number for the device, released: it sees the sums that were written before.
    fn answer(&self, number: u32);

    /// Writes sums from element `at` on.
    fn write_sums(&self, at: usize, sums: &[f32]);

    /// How many elements of sums there are.
    fn sums_elements(&self) -> usize;
}

/// What the bridge is told, in this order.
#[derive(Debug)]
enum BridgeCommand {
    /// A pass of this number begins.
    Begin(u64),
    /// A job of this number was posted.
    Sum(u32, AssistJob),
    /// The pass is over.
    End,
}

/// What both ends look at between orders.
#[derive(Debug, Default)]
struct Traffic {
    /// Jobs up to this number are not asked for any more.
    over: AtomicU32,
    /// The last pass of which a job was not computed.
    failed: AtomicU64,
}

/// The engine's end of a bridge. When it is dropped everything that was posted is answered, and the thread ends.
#[derive(Debug)]
pub struct Bridge<W: BridgeMemory> {
    wire: Arc<W>,
    traffic: Arc<Traffic>,
    /// `None` only while it is dropped.
    orders: Option<Sender<BridgeCommand>>,
    thread: Option<JoinHandle<()>>,
    x_elements: usize,
    /// Number of the job posted last.
    posted: u32,
    /// Number of the pass under way, or of the last one.
    pass: u64,
    is_under_way: bool,
}

impl<W: BridgeMemory> Bridge<W> {
    /// Has a thread of its own, with those of `compute`, sum what `assistant` gets no worker to sum.
    pub(super) fn new(
        assistant: WorkDispatcher,
        compute: Compute,
        slab: ActivationSlab,
        x_elements: usize,
        wire: W,
    ) -> anyhow::Result<Self> {
        let (wire, traffic) = (Arc::new(wire), Arc::new(Traffic::default()));
        // Words may stand anywhere when a bridge begins.
        let posted = wire.answered();
        traffic.over.store(posted, Ordering::Relaxed);
        let (orders, incoming) = channel();
        let attendant =
            BridgeThread::new(assistant, compute, slab, incoming, Arc::clone(&wire), Arc::clone(&traffic));
        let spawned = std::thread::Builder::new().name("bridge".to_owned()).spawn(move || attendant.run());
        let thread = Some(spawned.context("cannot start the thread between the device and its workers")?);
        let orders = Some(orders);
        Ok(Self { wire, traffic, orders, thread, x_elements, posted, pass: 0, is_under_way: false })
    }

    /// What the device shares with the bridge.
    #[must_use]
    pub fn wire(&self) -> &W {
        &self.wire
    }

    /// A pass begins: workers wake up. One that was not ended is over.
    pub fn begin_pass(&mut self) {
        if self.is_under_way {
            let _ = self.end_pass();
        }
        self.is_under_way = true;
        self.pass += 1;
        self.order(BridgeCommand::Begin(self.pass));
    }

    /// Takes on a job, and says its number. See [`model::cuda::assist::DeviceAssist::post`].
    ///
    /// # Panics
    ///
    /// If no pass is under way, or the job is larger than the slab or the sums.
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

    /// The pass is over; if it failed, so is what it posted. See [`model::cuda::assist::DeviceAssist::end_pass`].
    ///
    /// # Errors
    ///
    /// [`CudaError::Unanswered`] if a job was not computed.
    pub fn end_pass(&mut self) -> Result<(), CudaError> {
        self.is_under_way = false;
        // SYNC POINT answered: acquires, with the answer, a failure that went before it.
        let is_answered = has_reached(self.wire.answered(), self.posted);
        let has_failed = self.traffic.failed.load(Ordering::Relaxed) == self.pass;
        self.give_up();
        self.order(BridgeCommand::End);
        if is_answered && !has_failed { Ok(()) } else { Err(CudaError::Unanswered) }
    }

    /// Nothing posted so far is asked for any more.
    fn give_up(&self) {
        self.traffic.over.store(self.posted, Ordering::Relaxed);
    }

    fn order(&self, order: BridgeCommand) {
        let number = if let BridgeCommand::Sum(number, _) = order { Some(number) } else { None };
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok());
        // The thread catches its panics, so it is there; but if it were not, a device would wait for ever.
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
        // A stream that still waits is let go before anybody waits for the stream.
        self.wire.answer(self.posted);
    }
}
