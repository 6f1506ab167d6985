//! The executor's side of the board: asks workers for heads, and computes itself what they do not.
//!
//! A pass on the CPU asks from its own thread, with the rows at hand. For a device the bridge asks (`super::gpu_bridge`): the
//! rows lie in the slab already, and the sums go elsewhere. What is different between the two is in [`JobIo`]; how work is
//! cut, how long a worker is waited for, and when one is given up is the same.
//!
//! # Layout
//!
//! - `split`: how asks are cut. `worker_speed`: how long a slice should take.

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

/// A worker that has finished nothing for so long, although it was waited for so often, is given up.
const STUCK: Duration = Duration::from_secs(1);
const LEAST_STRIKES: u32 = 8;

/// Where a job's rows come from and its sums go, as far as the board has no part in it.
pub(super) trait JobIo {
    /// These rows are about to be read here.
    fn fetch(&mut self, rows: Range<usize>);

    /// The rows, as the asks count them. Only what was fetched is there.
    fn x(&self) -> &Activations;

    /// This process has summed these elements of `sums`.
    fn summed(&mut self, elements: Range<usize>, sums: &[f32]);

    /// How many slices of workers' are collected at a time.
    fn together(&self, pool: &ThreadPool) -> usize;

    /// Workers have summed these slices: each one's sums begin at an element of `sums`.
    fn collect(&mut self, pool: &mut ThreadPool, done: &[(usize, SliceSums)], sums: &mut [f32]);
}

/// A pass on the CPU has its rows at hand, and reads the sums when all are there.
struct HostJobIo<'a>(&'a Activations);

impl JobIo for HostJobIo<'_> {
    fn fetch(&mut self, _rows: Range<usize>) {}

    fn x(&self) -> &Activations {
        self.0
    }

    fn summed(&mut self, _elements: Range<usize>, _sums: &[f32]) {}

    /// A copy is short beside the wait for the next slice.
    fn together(&self, _pool: &ThreadPool) -> usize {
        1
    }

    fn collect(&mut self, _pool: &mut ThreadPool, done: &[(usize, SliceSums)], sums: &mut [f32]) {
        for (at, slice) in done {
            slice.read(0, &mut sums[*at..][..slice.len()]);
        }
    }
}

/// Asks the workers of one board.
#[derive(Debug)]
pub(super) struct WorkDispatcher {
    board: Board,
    poster: Producer,
    waits: Arc<WaitTime>,
    wanted: Arc<AtomicUsize>,
    /// The rows of the job, without those of other adapters between them.
    x: Vec<f32>,
    /// For each ask, where in the slab its rows begin; `None`: they had no room.
    places: Vec<Option<usize>>,
    slices: Vec<Slice>,
    /// For each slice, which rows of which ask it is.
    shares: Vec<WorkSplit>,
    /// What did not fit on the board.
    surplus: Vec<WorkSplit>,
    pace: WorkerSpeed,
    /// Workers that were waited for in vain since they last finished something.
    strikes: HashMap<WorkerNumber, MissedWaits>,
}

/// How often, and since when, a worker was waited for in vain.
#[derive(Debug, Clone, Copy)]
struct MissedWaits {
    count: u32,
    since: Instant,
}

impl WorkDispatcher {
    pub(super) fn new(
        board: Board,
        poster: Producer,
        waits: Arc<WaitTime>,
        wanted: Arc<AtomicUsize>,
    ) -> Self {
        Self {
            board,
            poster,
            waits,
            wanted,
            x: Vec::new(),
            places: Vec::new(),
            slices: Vec::new(),
            shares: Vec::new(),
            surplus: Vec::new(),
            pace: WorkerSpeed::default(),
            strikes: HashMap::new(),
        }
    }

    /// Copies the rows of the asks one behind the other, as far as the slab has room for them.
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
        (place + rows.len() <= self.poster.geometry().x_elements).then(|| self.x.extend_from_slice(rows))?;
        Some(place)
    }

    /// Cuts the asks, whose places are known, into slices, and keeps as surplus what the board has no room for.
    fn cut(&mut self, width: usize, asks: &[PartialSum<'_>]) {
        self.slices.clear();
        self.shares.clear();
        self.surplus.clear();
        let geometry = self.poster.geometry();
        let slice_rows = slice_rows(asks, self.poster.workers());
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

    /// Asks for rows that whoever computes the base has put into the slab itself, `x_rows` of them from its beginning:
    /// the asks count rows there. Their sums are those of the next [`complete`](Self::complete).
    pub(super) fn begin_in_place(&mut self, width: usize, x_rows: usize, asks: &[PartialSum<'_>]) {
        self.places.clear();
        self.places.extend(asks.iter().map(|ask| Some(ask.first_row * width)));
        self.cut(width, asks);
        failpoint::pass("executor.before_post");
        let posted = self.poster.post_in_place(x_rows * width, &self.slices);
        self.posted(posted);
    }

    fn posted(&mut self, posted: Result<(), PostError>) {
        if let Err(error) = posted {
            // Nothing has been posted, so all of it is computed here.
            tracing::error!(%error, "a job for the workers was not posted");
            self.surplus.append(&mut self.shares);
        }
        failpoint::pass("executor.after_post");
    }

    /// Sums some shares on the threads of this process.
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
        self.pace.note(shares.iter().map(|share| share.work(asks)).sum(), begin.elapsed() * threads);
        for share in shares.iter() {
            asks[share.ask].adapter.tally().executor(share.rank_rows(asks));
            ends.summed(share.elements(asks), sums);
        }
    }

    /// Computes what no worker has begun, from the end, as much at a time as there are threads: meanwhile workers go on
    /// from the beginning.
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
            if self.poster.state(index) != SliceState::Open {
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

    /// Has the sums of all `asks`, which are those the last job was begun with: what nobody else has summed is summed
    /// here. Afterwards every slice is done or taken back, so nobody who counts reads the slab any more.
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
            // Computed by `help`, or taken back because its worker is gone.
            if self.poster.state(index) == SliceState::Taken {
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

    /// True if the slice is this process's now.
    fn take_back(&mut self, index: usize) -> bool {
        self.poster.take_back(index) == TakeBack::Taken
    }

    /// Waits for a slice that a worker has begun, as long as that is worth it.
    fn await_done(&mut self, index: usize, work: u64) -> Option<SliceSums> {
        if let SliceState::Claimed(worker) = self.poster.state(index) {
            self.wait(index, worker, self.pace.patience(work));
        }
        if !matches!(self.poster.state(index), SliceState::Done(_)) && self.take_back(index) {
            return None;
        }
        if let SliceState::Done(worker) = self.poster.state(index) {
            self.strikes.remove(&worker);
        }
        self.poster.done(index).ok()
    }

    /// Looks at a slice until it is no longer being computed, or `patience` is over: less of it for a worker that has
    /// been waited for in vain.
    fn wait(&mut self, index: usize, worker: WorkerNumber, patience: Duration) {
        let vain = self.strikes.get(&worker).map_or(0, |strikes| strikes.count);
        let patience = patience / (1 << vain.min(16));
        let begin = Instant::now();
        let mut looks = 0u32;
        while let SliceState::Claimed(_) = self.poster.state(index) {
            std::hint::spin_loop();
            looks += 1;
            // The clock costs as much as dozens of looks.
            if looks.is_multiple_of(64) && begin.elapsed() > patience {
                self.strike(worker);
                break;
            }
        }
        self.waits.note(begin.elapsed());
    }

    /// A worker was waited for in vain. One that finishes nothing for long is stopped, stuck, or means harm.
    fn strike(&mut self, worker: WorkerNumber) {
        let now = Instant::now();
        if self.strikes.len() >= self.poster.geometry().seats {
            // Those who left are never heard of again.
            self.strikes.retain(|worker, _| self.board.is_admitted(*worker));
        }
        let strikes = self.strikes.entry(worker).or_insert(MissedWaits { count: 0, since: now });
        strikes.count += 1;
        if strikes.count >= LEAST_STRIKES && now - strikes.since > STUCK {
            tracing::warn!(%worker, "a worker begins slices and finishes none; it is given up");
            self.board.fence(worker);
            self.strikes.remove(&worker);
        }
    }
}

impl Assist for WorkDispatcher {
    fn helpers(&mut self) -> usize {
        self.poster.workers()
    }

    fn begin_pass(&mut self) {
        let workers = match self.wanted.load(Ordering::Relaxed) {
            0 => self.poster.workers(),
            wanted => wanted.min(self.poster.workers()),
        };
        self.poster.announce(u32::try_from(workers).unwrap_or(u32::MAX));
    }

    fn end_pass(&mut self) {
        self.poster.finish();
        self.poster.rest();
    }

    fn begin(&mut self, x: &Activations, asks: &[PartialSum<'_>]) {
        self.pack(x, asks);
        self.cut(x.width(), asks);
        failpoint::pass("executor.before_post");
        let posted = self.poster.post(&self.x, &self.slices);
        self.posted(posted);
    }

    fn finish(&mut self, compute: &mut Compute, x: &Activations, asks: &[PartialSum<'_>], sums: &mut [f32]) {
        self.complete(compute, &mut HostJobIo(x), asks, sums);
    }
}

#[cfg(test)]
mod tests;
