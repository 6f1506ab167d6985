//! The executor's side of the board: posts leading ranks for workers, and computes what they do not.
//!
//! A pass on the CPU posts from its own thread and has the rows at hand. For a device, the bridge posts
//! (`super::gpu_bridge`): the rows lie in the slab, and the sums go elsewhere. [`JobIo`] covers that
//! difference; the split, the wait for a worker and its fencing are the same.
//!
//! # Layout
//!
//! - `split`: the split of partial sums into slices. `worker_speed`: the expected time of a slice.

mod split;
mod worker_speed;

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use kernels::{
    Activations, ThreadPool,
    lora::{LeadingSegment, sum_heads},
};
use model::{
    cpu::Compute,
    deltas::assist::{Assist, PartialSum},
};
use shmproto::board::{
    Board, PostError, Producer, SUMS_ALIGN, Slice, SliceState, SliceSums, TakeBack, WorkerNumber,
};

use self::{
    split::{WorkSplit, slice, slice_rows},
    worker_speed::WorkerSpeed,
};
use super::WaitTime;

/// Minimum time from the first missed wait of a worker until the worker is fenced.
const STUCK: Duration = Duration::from_secs(1);
/// Minimum number of missed waits before a worker is fenced.
const LEAST_STRIKES: u32 = 8;

/// Source of a job's rows and sink of its sums, apart from the board.
pub(super) trait JobIo {
    /// Makes rows available that are about to be read here.
    fn fetch(&mut self, rows: Range<usize>);

    /// Returns the rows, with the row numbers of the partial sums. Only fetched rows are valid.
    fn x(&self) -> &Activations;

    /// Takes elements of `sums` that this process has summed.
    fn summed(&mut self, elements: Range<usize>, sums: &[f32]);

    /// Returns the number of finished slices that are collected at a time.
    fn together(&self, pool: &ThreadPool) -> usize;

    /// Takes finished slices, each with the first element of its sums in `sums`.
    fn collect(&mut self, pool: &mut ThreadPool, done: &[(usize, SliceSums)], sums: &mut [f32]);
}

/// A CPU pass has its rows at hand, and reads the sums when all are complete.
struct HostJobIo<'a>(&'a Activations);

impl JobIo for HostJobIo<'_> {
    fn fetch(&mut self, _rows: Range<usize>) {}

    fn x(&self) -> &Activations {
        self.0
    }

    fn summed(&mut self, _elements: Range<usize>, _sums: &[f32]) {}

    /// A copy is short compared with the wait for the next slice.
    fn together(&self, _pool: &ThreadPool) -> usize {
        1
    }

    fn collect(&mut self, _pool: &mut ThreadPool, done: &[(usize, SliceSums)], sums: &mut [f32]) {
        for (at, slice) in done {
            slice.read(0, &mut sums[*at..][..slice.len()]);
        }
    }
}

/// Posts jobs on one board.
#[derive(Debug)]
pub(super) struct WorkDispatcher {
    board: Board,
    producer: Producer,
    waits: Arc<WaitTime>,
    wanted: Arc<AtomicUsize>,
    /// Rows of the job, without rows of other adapters between them.
    x: Vec<f32>,
    /// First element of each partial sum's rows in the slab; `None` if they did not fit.
    places: Vec<Option<usize>>,
    slices: Vec<Slice>,
    /// Rows and partial sum of each slice.
    shares: Vec<WorkSplit>,
    /// Splits that did not fit on the board.
    surplus: Vec<WorkSplit>,
    speed: WorkerSpeed,
    /// Workers with missed waits since they last finished a slice.
    strikes: HashMap<WorkerNumber, MissedWaits>,
}

/// Number of missed waits for a worker, and the time of the first.
#[derive(Debug, Clone, Copy)]
struct MissedWaits {
    count: u32,
    since: Instant,
}

impl WorkDispatcher {
    pub(super) fn new(
        board: Board,
        producer: Producer,
        waits: Arc<WaitTime>,
        wanted: Arc<AtomicUsize>,
    ) -> Self {
        Self {
            board,
            producer,
            waits,
            wanted,
            x: Vec::new(),
            places: Vec::new(),
            slices: Vec::new(),
            shares: Vec::new(),
            surplus: Vec::new(),
            speed: WorkerSpeed::default(),
            strikes: HashMap::new(),
        }
    }

    /// Copies the rows of the partial sums contiguously, as far as they fit in the slab.
    fn pack(&mut self, x: &Activations, asks: &[PartialSum<'_>]) {
        self.x.clear();
        self.places.clear();
        let mut known = None;
        for ask in asks {
            // The layers of a group share their rows.
            let span = (ask.first_row, ask.rows);
            let place = match known {
                Some((same, place)) if same == span => place,
                _ => self.append(&x.values()[ask.first_row * x.width()..][..ask.rows * x.width()]),
            };
            known = Some((span, place));
            self.places.push(place);
        }
    }

    fn append(&mut self, rows: &[f32]) -> Option<usize> {
        let place = self.x.len();
        (place + rows.len() <= self.producer.geometry().x_elements)
            .then(|| self.x.extend_from_slice(rows))?;
        Some(place)
    }

    /// Splits the partial sums into slices; splits that do not fit on the board become surplus.
    fn cut(&mut self, width: usize, asks: &[PartialSum<'_>]) {
        self.slices.clear();
        self.shares.clear();
        self.surplus.clear();
        let geometry = self.producer.geometry();
        let slice_rows = slice_rows(asks, self.producer.workers());
        let mut sums_end = 0;
        for (index, (ask, place)) in asks.iter().zip(&self.places).enumerate() {
            for first in (0..ask.rows).step_by(slice_rows) {
                let share = WorkSplit { ask: index, first, rows: slice_rows.min(ask.rows - first) };
                let fits = self.slices.len() < geometry.slices
                    && sums_end + share.rows * ask.matrix.rows() <= geometry.sums_elements;
                let place = place.filter(|_| fits);
                match place.and_then(|x_offset| slice(ask, share, width, x_offset, sums_end)) {
                    Some(slice) => {
                        sums_end = (sums_end + slice.sums_elements as usize).next_multiple_of(SUMS_ALIGN);
                        self.slices.push(slice);
                        self.shares.push(share);
                    }
                    None => self.surplus.push(share),
                }
            }
        }
    }

    /// Posts a job whose first `x_rows` rows the device has written to the slab, where the partial sums count
    /// rows. The next [`complete`](Self::complete) returns its sums.
    pub(super) fn begin_in_place(&mut self, width: usize, x_rows: usize, asks: &[PartialSum<'_>]) {
        self.places.clear();
        self.places.extend(asks.iter().map(|ask| Some(ask.first_row * width)));
        self.cut(width, asks);
        failpoint::pass("executor.before_post");
        let posted = self.producer.post_in_place(x_rows * width, &self.slices);
        self.posted(posted);
    }

    fn posted(&mut self, posted: Result<(), PostError>) {
        if let Err(error) = posted {
            // Nothing was posted, so everything is computed here.
            tracing::error!(%error, "cannot post a job for the workers");
            self.surplus.append(&mut self.shares);
        }
        failpoint::pass("executor.after_post");
    }

    /// Sums some splits on the threads of this process.
    fn sum(
        &mut self,
        compute: &mut Compute,
        ends: &mut dyn JobIo,
        asks: &[PartialSum<'_>],
        shares: &mut [WorkSplit],
        sums: &mut [f32],
    ) {
        if shares.is_empty() {
            return;
        }
        shares.sort_unstable();
        let segments: Vec<LeadingSegment<'_>> = shares.iter().map(|share| share.segment(asks)).collect();
        shares.iter().for_each(|share| ends.fetch(share.rows(asks)));
        let begin = Instant::now();
        sum_heads(&mut compute.pool, compute.isa, ends.x(), &segments, sums);
        let threads = u32::try_from(compute.pool.threads().min(shares.len())).unwrap_or(1);
        self.speed.note(shares.iter().map(|share| share.work(asks)).sum(), begin.elapsed() * threads);
        for share in shares.iter() {
            asks[share.ask].adapter.tally().executor(share.rank_rows(asks));
            ends.summed(share.elements(asks), sums);
        }
    }

    /// Computes slices that no worker has claimed, from the end, while workers continue from the beginning.
    /// Takes as many slices at a time as there are threads.
    fn help(
        &mut self,
        compute: &mut Compute,
        ends: &mut dyn JobIo,
        asks: &[PartialSum<'_>],
        sums: &mut [f32],
    ) {
        let mut taken = std::mem::take(&mut self.surplus);
        let threads = compute.pool.threads();
        for index in (0..self.shares.len()).rev() {
            if self.producer.state(index) != SliceState::Open {
                continue;
            }
            if self.take_back(index) {
                taken.push(self.shares[index]);
            }
            if taken.len() >= threads {
                self.sum(compute, ends, asks, &mut taken, sums);
                taken.clear();
            }
        }
        self.sum(compute, ends, asks, &mut taken, sums);
        taken.clear();
        self.surplus = taken;
    }

    /// Completes the sums of all `asks` of the latest job, and computes here what no worker has. Afterwards
    /// every slice is done or taken back, so no valid reader of the slab is left.
    pub(super) fn complete(
        &mut self,
        compute: &mut Compute,
        ends: &mut dyn JobIo,
        asks: &[PartialSum<'_>],
        sums: &mut [f32],
    ) {
        self.help(compute, ends, asks, sums);
        let (mut left, mut done) = (Vec::new(), Vec::new());
        let together = ends.together(&compute.pool);
        for index in 0..self.shares.len() {
            let share = self.shares[index];
            // `help` computed the slice, or it was taken back because its worker is gone.
            if self.producer.state(index) == SliceState::Taken {
                continue;
            }
            let Some(slice) = self.await_done(index, share.work(asks)) else {
                left.push(share);
                continue;
            };
            asks[share.ask].adapter.tally().workers(share.rank_rows(asks));
            done.push((share.elements(asks).start, slice));
            if done.len() == together {
                ends.collect(&mut compute.pool, &done, sums);
                done.clear();
            }
        }
        ends.collect(&mut compute.pool, &done, sums);
        failpoint::pass("executor.slices_collected");
        self.sum(compute, ends, asks, &mut left, sums);
    }

    /// True if the slice now belongs to this process.
    fn take_back(&mut self, index: usize) -> bool {
        self.producer.take_back(index) == TakeBack::Taken
    }

    /// Waits for a claimed slice of `work` multiply-adds, up to the expected time.
    fn await_done(&mut self, index: usize, work: u64) -> Option<SliceSums> {
        if let SliceState::Claimed(worker) = self.producer.state(index) {
            self.wait(index, worker, self.speed.patience(work));
        }
        if !matches!(self.producer.state(index), SliceState::Done(_)) && self.take_back(index) {
            return None;
        }
        if let SliceState::Done(worker) = self.producer.state(index) {
            self.strikes.remove(&worker);
        }
        self.producer.done(index).ok()
    }

    /// Polls a slice until it is no longer claimed, or `patience` is over. Each missed wait for the worker
    /// halves the patience.
    fn wait(&mut self, index: usize, worker: WorkerNumber, patience: Duration) {
        let vain = self.strikes.get(&worker).map_or(0, |strikes| strikes.count);
        let patience = patience / (1 << vain.min(16));
        let begin = Instant::now();
        let mut looks = 0u32;
        while let SliceState::Claimed(_) = self.producer.state(index) {
            std::hint::spin_loop();
            looks += 1;
            // Reading the clock costs as much as dozens of polls.
            if looks.is_multiple_of(64) && begin.elapsed() > patience {
                self.strike(worker);
                break;
            }
        }
        self.waits.note(begin.elapsed());
    }

    /// Counts a missed wait. Fences a worker that finishes nothing for long: it is stuck or malicious.
    fn strike(&mut self, worker: WorkerNumber) {
        let now = Instant::now();
        if self.strikes.len() >= self.producer.geometry().seats {
            // Lost workers never return under their numbers.
            self.strikes.retain(|worker, _| self.board.is_admitted(*worker));
        }
        let strikes = self.strikes.entry(worker).or_insert(MissedWaits { count: 0, since: now });
        strikes.count += 1;
        if strikes.count >= LEAST_STRIKES && now - strikes.since > STUCK {
            tracing::warn!(%worker, "a worker claims slices but finishes none; it is fenced");
            self.board.fence(worker);
            self.strikes.remove(&worker);
        }
    }
}

impl Assist for WorkDispatcher {
    fn helpers(&mut self) -> usize {
        self.producer.workers()
    }

    fn begin_pass(&mut self) {
        let workers = match self.wanted.load(Ordering::Relaxed) {
            0 => self.producer.workers(),
            wanted => wanted.min(self.producer.workers()),
        };
        self.producer.announce(u32::try_from(workers).unwrap_or(u32::MAX));
    }

    fn end_pass(&mut self) {
        self.producer.finish();
        self.producer.rest();
    }

    fn begin(&mut self, x: &Activations, asks: &[PartialSum<'_>]) {
        self.pack(x, asks);
        self.cut(x.width(), asks);
        failpoint::pass("executor.before_post");
        let posted = self.producer.post(&self.x, &self.slices);
        self.posted(posted);
    }

    fn finish(&mut self, compute: &mut Compute, x: &Activations, asks: &[PartialSum<'_>], sums: &mut [f32]) {
        self.complete(compute, &mut HostJobIo(x), asks, sums);
    }
}

#[cfg(test)]
mod tests;
