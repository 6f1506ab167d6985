//! The bridge's thread, which moves each job from the device to the board and its sums back.

use std::{
    hint::spin_loop,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, TryRecvError},
    },
    thread::yield_now,
    time::{Duration, Instant},
};

use failpoint::FailpointOutcome;
use kernels::{Activations, ThreadPool, cuda::board::has_reached};
use model::{
    cpu::Compute,
    deltas::assist::{Assist as _, AssistJob, PartialSum},
};
use shmproto::board::{ActivationSlab, SliceSums};

use super::{BridgeCommand, BridgeMemory, Traffic};
use crate::workers::work_dispatcher::{JobIo, WorkDispatcher};

/// Time to spin for the next command of a pass before sleeping. The engine is ahead of the device, so most
/// commands are there already.
const SPIN: Duration = Duration::from_micros(200);

/// Number of sums copied at a time from a worker to the device, which fit in the first-level cache.
const PART: usize = 2048;

/// Number of polls between two yields of the core.
const SELFISH_LOOKS: u32 = 64;

pub(super) struct BridgeThread<W> {
    assistant: WorkDispatcher,
    compute: Compute,
    orders: Receiver<BridgeCommand>,
    wire: Arc<W>,
    traffic: Arc<Traffic>,
    /// Number of the pass, and whether one of its jobs was lost.
    pass: u64,
    has_failed: bool,
    is_under_way: bool,
    rows: LazyRows,
    sums: Vec<f32>,
}

impl<W: BridgeMemory> BridgeThread<W> {
    pub(super) fn new(
        assistant: WorkDispatcher,
        compute: Compute,
        slab: ActivationSlab,
        orders: Receiver<BridgeCommand>,
        wire: Arc<W>,
        traffic: Arc<Traffic>,
    ) -> Self {
        Self {
            assistant,
            compute,
            orders,
            wire,
            traffic,
            pass: 0,
            has_failed: false,
            is_under_way: false,
            rows: LazyRows::new(slab),
            sums: Vec::new(),
        }
    }

    /// Executes commands until all senders are gone.
    pub(super) fn run(mut self) {
        while let Some(order) = self.next() {
            match order {
                BridgeCommand::Begin(pass) => {
                    (self.pass, self.has_failed, self.is_under_way) = (pass, false, true);
                    self.guarded(|it| it.assistant.begin_pass());
                }
                BridgeCommand::Sum(number, job) => self.serve(number, &job),
                BridgeCommand::End => {
                    self.is_under_way = false;
                    self.guarded(|it| it.assistant.end_pass());
                }
            }
        }
    }

    /// Returns the next command, and spins for it during a pass.
    fn next(&self) -> Option<BridgeCommand> {
        let end = self.is_under_way.then(|| Instant::now() + SPIN);
        let mut looks = 0u32;
        while end.is_some_and(|end| !looks.is_multiple_of(SELFISH_LOOKS) || Instant::now() < end) {
            match self.orders.try_recv() {
                Ok(order) => return Some(order),
                Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => look_again(&mut looks),
            }
        }
        self.orders.recv().ok()
    }

    /// Answers a job, whether it was computed or not.
    fn serve(&mut self, number: u32, job: &AssistJob) {
        if !self.has_failed {
            self.guarded(|it| {
                if it.is_asked(number) {
                    it.sum(job);
                } else {
                    // The pass ended without this job.
                    it.has_failed = true;
                }
            });
        }
        // Relaxed suffices for the failure, because the answer below releases it.
        if self.has_failed {
            self.traffic.failed.store(self.pass, Ordering::Relaxed);
        }
        failpoint::pass("executor.bridge_before_answer");
        // SYNC POINT answered: releases the sums, and the slab: no admitted worker reads it any more.
        self.wire.answer(number);
    }

    /// Polls until the device has requested a job; false if it never will.
    fn is_asked(&self, number: u32) -> bool {
        let mut looks = 0u32;
        loop {
            // The load acquires the rows, which the device fenced at system scope before it stored the
            // number. Workers acquire them from here, by the point `post` of the board.
            if has_reached(self.wire.asked(), number) {
                return true;
            }
            if has_reached(self.traffic.over.load(Ordering::Relaxed), number) {
                return false;
            }
            look_again(&mut looks);
        }
    }

    /// Has the leading ranks of a job summed.
    fn sum(&mut self, job: &AssistJob) {
        let Self { assistant, compute, wire, rows, sums, .. } = self;
        let asks: Vec<PartialSum<'_>> = job.asks.iter().filter_map(|owned| owned.ask()).collect();
        if sums.len() < job.sums {
            sums.resize(job.sums, 0.0);
        }
        rows.expect(job.x_rows, job.width);
        assistant.begin_in_place(job.width, job.x_rows, &asks);
        if failpoint::hit("executor.bridge_asked") == FailpointOutcome::Fail {
            panic!("a failpoint");
        }
        assistant.complete(compute, &mut DeviceJobIo { rows, wire: &**wire }, &asks, &mut sums[..job.sums]);
    }

    /// Runs `what`; a panic fails the pass but not the thread.
    fn guarded(&mut self, what: impl FnOnce(&mut Self)) {
        // The next job replaces all state that a panic leaves behind: its slices, rows and sums.
        if catch_unwind(AssertUnwindSafe(|| what(self))).is_ok() {
            return;
        }
        tracing::error!("the bridge thread panicked; this pass fails, and the next one continues");
        self.has_failed = true;
        // Keeps workers from continuing with the job.
        let _ = catch_unwind(AssertUnwindSafe(|| self.assistant.end_pass()));
    }
}

/// Spins once, and yields the core every [`SELFISH_LOOKS`] times.
fn look_again(looks: &mut u32) {
    *looks = looks.wrapping_add(1);
    if looks.is_multiple_of(SELFISH_LOOKS) { yield_now() } else { spin_loop() }
}

/// Rows of a job, copied from the slab when this process needs them.
struct LazyRows {
    slab: ActivationSlab,
    /// One buffer per layer width, so that buffers are not cleared again for each job.
    by_width: Vec<Activations>,
    /// Index of the buffer for the current job.
    now: usize,
    /// Whether each row was copied from the slab.
    is_here: Vec<bool>,
}

impl LazyRows {
    fn new(slab: ActivationSlab) -> Self {
        Self { slab, by_width: Vec::new(), now: 0, is_here: Vec::new() }
    }

    /// Resets the state for another job's rows.
    fn expect(&mut self, rows: usize, width: usize) {
        let known = self.by_width.iter().position(|x| x.width() == width);
        self.now = known.unwrap_or(self.by_width.len());
        if known.is_none() {
            self.by_width.push(Activations::default());
        }
        let x = &mut self.by_width[self.now];
        x.reshape(rows.max(x.rows()), width);
        self.is_here.clear();
        self.is_here.resize(rows, false);
    }

    /// Copies the missing rows.
    fn fetch(&mut self, rows: Range<usize>) {
        let x = &mut self.by_width[self.now];
        let width = x.width();
        for row in rows {
            if !std::mem::replace(&mut self.is_here[row], true) {
                let values = row * width..(row + 1) * width;
                self.slab.read(values.start, &mut x.values_mut()[values]);
            }
        }
    }
}

/// Rows and sums of a device's job.
struct DeviceJobIo<'a, W> {
    rows: &'a mut LazyRows,
    wire: &'a W,
}

impl<W: BridgeMemory> JobIo for DeviceJobIo<'_, W> {
    fn fetch(&mut self, rows: Range<usize>) {
        self.rows.fetch(rows);
    }

    fn x(&self) -> &Activations {
        &self.rows.by_width[self.rows.now]
    }

    fn summed(&mut self, elements: Range<usize>, sums: &[f32]) {
        self.wire.write_sums(elements.start, &sums[elements]);
    }

    /// All threads copy, so that the device does not wait for one.
    fn together(&self, pool: &ThreadPool) -> usize {
        pool.threads()
    }

    fn collect(&mut self, pool: &mut ThreadPool, done: &[(usize, SliceSums)], _sums: &mut [f32]) {
        let wire = self.wire;
        pool.run(done.len(), |index| {
            let (to, slice) = &done[index];
            let mut part = [0.0; PART];
            for at in (0..slice.len()).step_by(PART) {
                let part = &mut part[..PART.min(slice.len() - at)];
                slice.read(at, part);
                wire.write_sums(to + at, part);
            }
        });
    }
}
