//! The compute thread's side of the board: asks workers for heads, and computes itself what they do not.

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
    Activations,
    lora::{HeadSegment, sum_heads},
};
use model::{
    assist::{Ask, Assist},
    forward::Compute,
};
use shmproto::board::{Board, Generation, Poster, SUMS_ALIGN, Slice, SliceState, TakeBack};

use super::Waits;
use crate::images::module;

/// Rows of an ask that one worker takes at a time: at least, and at most.
const SLICE_ROWS: Range<usize> = 16..64;

/// Slices there should be for each worker, so that a slow one holds up little.
const SLICES_A_WORKER: usize = 4;

/// How long the first slice of a process may take.
const FIRST_PATIENCE: Duration = Duration::from_micros(200);

/// A worker that has finished nothing for so long, although it was waited for so often, is given up.
const STUCK: Duration = Duration::from_secs(1);
const LEAST_STRIKES: u32 = 8;

/// A slice that takes so many times as long as others of its size is taken back.
const PATIENCE: u32 = 4;

/// Asks the workers of one board.
#[derive(Debug)]
pub(super) struct Assistant {
    board: Board,
    poster: Poster,
    waits: Arc<Waits>,
    wanted: Arc<AtomicUsize>,
    /// The rows of the job, without those of other adapters between them.
    x: Vec<f32>,
    slices: Vec<Slice>,
    /// For each slice, which rows of which ask it is.
    shares: Vec<Share>,
    /// What did not fit on the board.
    surplus: Vec<Share>,
    pace: Pace,
    /// Workers that were waited for in vain since they last finished something.
    strikes: HashMap<Generation, Strikes>,
}

/// How often, and since when, a worker was waited for in vain.
#[derive(Debug, Clone, Copy)]
struct Strikes {
    count: u32,
    since: Instant,
}

/// Some rows of an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Share {
    ask: usize,
    /// First row within the ask.
    first: usize,
    rows: usize,
}

impl Share {
    /// Element of the sums at which its own begin.
    fn offset(self, asks: &[Ask<'_>]) -> usize {
        let ask = &asks[self.ask];
        ask.offset + self.first * ask.matrix.rows()
    }

    fn elements(self, asks: &[Ask<'_>]) -> Range<usize> {
        let first = self.offset(asks);
        first..first + self.rows * asks[self.ask].matrix.rows()
    }

    fn rank_rows(self, asks: &[Ask<'_>]) -> u64 {
        (self.rows * asks[self.ask].ranks) as u64
    }

    /// Multiply-adds.
    fn work(self, asks: &[Ask<'_>]) -> u64 {
        let matrix = asks[self.ask].matrix;
        self.rank_rows(asks) * (matrix.columns() + matrix.rows()) as u64
    }

    fn segment<'a>(self, asks: &[Ask<'a>]) -> HeadSegment<'a> {
        let Ask { first_row, matrix, ranks, .. } = asks[self.ask];
        let offset = self.offset(asks);
        HeadSegment { first_row: first_row + self.first, rows: self.rows, matrix, ranks, offset }
    }
}

/// How long this process takes for a multiply-add: what is to be expected of workers on cores like its own.
#[derive(Debug, Default)]
struct Pace {
    work: u64,
    taken: Duration,
}

impl Pace {
    fn note(&mut self, work: u64, taken: Duration) {
        // Old figures fade: a machine has good and bad minutes.
        if self.work > 1 << 32 {
            self.work /= 2;
            self.taken /= 2;
        }
        self.work += work;
        self.taken += taken;
    }

    /// How long to wait for a slice of so much work.
    fn patience(&self, work: u64) -> Duration {
        if self.work == 0 {
            return FIRST_PATIENCE;
        }
        let expected = self.taken.mul_f64(work as f64 / self.work as f64);
        expected.saturating_mul(PATIENCE).max(FIRST_PATIENCE / 4)
    }
}

impl Assistant {
    pub(super) fn new(board: Board, poster: Poster, waits: Arc<Waits>, wanted: Arc<AtomicUsize>) -> Self {
        Self {
            board,
            poster,
            waits,
            wanted,
            x: Vec::new(),
            slices: Vec::new(),
            shares: Vec::new(),
            surplus: Vec::new(),
            pace: Pace::default(),
            strikes: HashMap::new(),
        }
    }

    /// Cuts the asks into slices, and keeps as surplus what the board has no room for.
    fn cut(&mut self, x: &Activations, asks: &[Ask<'_>]) {
        self.x.clear();
        self.slices.clear();
        self.shares.clear();
        self.surplus.clear();
        let geometry = self.poster.geometry();
        let slice_rows = slice_rows(asks, self.poster.workers());
        let mut rows_at = None;
        let mut sums_end = 0;
        for (index, ask) in asks.iter().enumerate() {
            // The layers of a group share their rows.
            let span = (ask.first_row, ask.rows);
            if rows_at.is_none_or(|(known, _)| known != span) {
                rows_at = Some((span, self.x.len()));
                let elements = ask.first_row * x.width()..(ask.first_row + ask.rows) * x.width();
                if self.x.len() + elements.len() <= geometry.x_elements {
                    self.x.extend_from_slice(&x.values()[elements]);
                }
            }
            let x_offset = rows_at.map_or(0, |(_, at)| at);
            for first in (0..ask.rows).step_by(slice_rows) {
                let share = Share { ask: index, first, rows: slice_rows.min(ask.rows - first) };
                let slice = slice(ask, share, x.width(), x_offset, sums_end);
                let fits = x_offset + (first + share.rows) * x.width() <= self.x.len()
                    && self.slices.len() < geometry.slices
                    && sums_end + share.rows * ask.matrix.rows() <= geometry.sums_elements;
                match slice.filter(|_| fits) {
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

    /// Sums some shares on the threads of this process.
    fn sum(
        &mut self,
        compute: &mut Compute,
        x: &Activations,
        asks: &[Ask<'_>],
        shares: &mut [Share],
        sums: &mut [f32],
    ) {
        if shares.is_empty() {
            return;
        }
        shares.sort_unstable();
        let segments: Vec<HeadSegment<'_>> = shares.iter().map(|share| share.segment(asks)).collect();
        let begin = Instant::now();
        sum_heads(&mut compute.pool, compute.isa, x, &segments, sums);
        let threads = u32::try_from(compute.pool.threads().min(shares.len())).unwrap_or(1);
        self.pace.note(shares.iter().map(|share| share.work(asks)).sum(), begin.elapsed() * threads);
        for share in shares.iter() {
            asks[share.ask].adapter.tally().executor(share.rank_rows(asks));
        }
    }

    /// Computes what no worker has begun, from the end, as much at a time as there are threads: meanwhile workers go on
    /// from the beginning.
    fn help(&mut self, compute: &mut Compute, x: &Activations, asks: &[Ask<'_>], sums: &mut [f32]) {
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
                self.sum(compute, x, asks, &mut taken, sums);
                taken.clear();
            }
        }
        self.sum(compute, x, asks, &mut taken, sums);
        taken.clear();
        self.surplus = taken;
    }

    /// True if the slice is this process's now.
    fn take_back(&mut self, index: usize) -> bool {
        self.poster.take_back(index) == TakeBack::Taken
    }

    /// Waits for a slice that a worker has begun, as long as that is worth it; true if its sums have been copied.
    fn collect(&mut self, index: usize, work: u64, sums: &mut [f32]) -> bool {
        if let SliceState::Claimed(worker) = self.poster.state(index) {
            self.wait(index, worker, self.pace.patience(work));
        }
        if !matches!(self.poster.state(index), SliceState::Done(_)) && self.take_back(index) {
            return false;
        }
        if let SliceState::Done(worker) = self.poster.state(index) {
            self.strikes.remove(&worker);
        }
        self.poster.read(index, sums).is_ok()
    }

    /// Looks at a slice until it is no longer being computed, or `patience` is over: less of it for a worker that has
    /// been waited for in vain.
    fn wait(&mut self, index: usize, worker: Generation, patience: Duration) {
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
    fn strike(&mut self, worker: Generation) {
        let now = Instant::now();
        if self.strikes.len() >= self.poster.geometry().seats {
            // Those who left are never heard of again.
            self.strikes.retain(|worker, _| self.board.is_admitted(*worker));
        }
        let strikes = self.strikes.entry(worker).or_insert(Strikes { count: 0, since: now });
        strikes.count += 1;
        if strikes.count >= LEAST_STRIKES && now - strikes.since > STUCK {
            tracing::warn!(%worker, "a worker begins slices and finishes none; it is given up");
            self.board.fence(worker);
            self.strikes.remove(&worker);
        }
    }
}

/// Rows of a slice: enough slices for all workers, none too small to be worth a claim.
fn slice_rows(asks: &[Ask<'_>], workers: usize) -> usize {
    let rows: usize = asks.iter().map(|ask| ask.rows).sum();
    (rows / (SLICES_A_WORKER * workers.max(1))).clamp(SLICE_ROWS.start, SLICE_ROWS.end)
}

fn slice(ask: &Ask<'_>, share: Share, width: usize, x_offset: usize, sums_offset: usize) -> Option<Slice> {
    Some(Slice {
        image: ask.adapter.image().0,
        module: module(ask.layer, ask.target),
        first_row: u32::try_from(share.first).ok()?,
        rows: u32::try_from(share.rows).ok()?,
        width: u32::try_from(width).ok()?,
        first_rank: 0,
        last_rank: u32::try_from(ask.ranks).ok()?,
        x_offset: u32::try_from(x_offset).ok()?,
        sums_offset: sums_offset as u64,
        sums_elements: u32::try_from(share.rows * ask.matrix.rows()).ok()?,
    })
}

impl Assist for Assistant {
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

    fn begin(&mut self, x: &Activations, asks: &[Ask<'_>]) {
        self.cut(x, asks);
        failpoint::pass("executor.before_post");
        if let Err(error) = self.poster.post(&self.x, &self.slices) {
            // Nothing has been posted, so all of it is computed here.
            tracing::error!(%error, "a job for the workers was not posted");
            self.surplus.append(&mut self.shares);
        }
        failpoint::pass("executor.after_post");
    }

    fn finish(&mut self, compute: &mut Compute, x: &Activations, asks: &[Ask<'_>], sums: &mut [f32]) {
        self.help(compute, x, asks, sums);
        let mut left = Vec::new();
        for index in 0..self.shares.len() {
            let share = self.shares[index];
            match self.poster.state(index) {
                // Computed by `help`, or taken back because its worker is gone.
                SliceState::Taken => continue,
                _ if self.collect(index, share.work(asks), &mut sums[share.elements(asks)]) => {
                    asks[share.ask].adapter.tally().workers(share.rank_rows(asks));
                }
                _ => left.push(share),
            }
        }
        failpoint::pass("executor.slices_collected");
        self.sum(compute, x, asks, &mut left, sums);
    }
}

#[cfg(test)]
mod tests;
