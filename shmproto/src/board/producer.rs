//! The engine thread's end of a board: posts jobs and takes back slices that are late.

use std::sync::Arc;

use thiserror::Error;

use super::WorkerNumber;
use super::shared::{AdmittedWorker, BoardShared};
use super::slice::{Slice, SliceError};
use super::slice_state::{JobNumber, SlicePhase, SliceWord};
use super::sums::SliceSums;
use crate::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use crate::atomic::fence;
use crate::futex;

/// Error of a job that cannot be posted. The board then holds no job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PostError {
    /// The job has more slices than the table.
    #[error("{slices} slices are more than the {limit} of the board: cut the job into fewer")]
    TooManySlices {
        /// Number of slices of the job.
        slices: usize,
        /// Number of entries of the table.
        limit: usize,
    },
    /// The rows of x exceed the slab.
    #[error("{elements} numbers of x are more than the {limit} of the board: post fewer rows")]
    TooLargeX {
        /// Number of elements of x.
        elements: usize,
        /// Number of elements in the slab.
        limit: usize,
    },
    /// A slice does not fit the board, or names rows that were not posted.
    #[error("slice {index} cannot be posted")]
    Slice {
        /// Index of the slice in the job.
        index: usize,
        /// Reason for which the slice is refused.
        source: SliceError,
    },
    /// Two slices would write the same sums.
    #[error("the sums of slice {index} begin before those of the slice before it end: lay them out in order")]
    Overlap {
        /// Index of the second slice.
        index: usize,
    },
}

/// State of a slice in the executor's own view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceState {
    /// No worker has claimed the slice.
    Open,
    /// An admitted worker computes the slice.
    Claimed(WorkerNumber),
    /// The sums can be read.
    Done(WorkerNumber),
    /// The worker failed the slice, was fenced, or broke the protocol. The executor must take it back.
    Lost,
    /// The executor has taken the slice back.
    Taken,
}

/// Result of taking a slice back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeBack {
    /// The slice belongs to the caller; later writes of a worker are ignored.
    Taken,
    /// A worker has finished the slice: the sums can be read.
    AlreadyDone(WorkerNumber),
}

/// Error of a slice that is not done, was taken back, or lost its worker. The caller must compute its sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the sums of slice {index} are not there: compute them here")]
pub struct WorkerGone {
    /// Index of the slice in the posted job.
    pub index: usize,
}

/// The only end that posts jobs, for one thread. System calls happen only in posting and
/// [`Producer::announce`], if a worker sleeps, and in fencing a worker that broke the protocol.
#[derive(Debug)]
pub struct Producer {
    shared: Arc<BoardShared>,
    job: JobNumber,
    /// Private state of the posted slices, which decides; the shared words only report the workers' claims.
    slices: Vec<PostedSlice>,
    /// Admitted workers by slot, as of `changes`.
    seated: Vec<Option<AdmittedWorker>>,
    issued: u32,
    changes: u64,
}

#[derive(Debug, Clone, Copy)]
struct PostedSlice {
    slice: Slice,
    end: SliceEnd,
}

/// Final state of a slice, which later values of the shared word do not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SliceEnd {
    Pending,
    Done(WorkerNumber),
    Lost,
    Taken,
}

impl Producer {
    pub(super) fn new(shared: Arc<BoardShared>) -> Self {
        let slices = Vec::with_capacity(shared.geometry.slices);
        let seated = vec![None; shared.geometry.seats];
        Self { shared, job: JobNumber::NONE, slices, seated, issued: 0, changes: 0 }
    }

    /// Returns the sizes of the board.
    #[must_use]
    pub fn geometry(&self) -> super::Geometry {
        self.shared.geometry
    }

    /// Returns the number of admitted workers.
    pub fn workers(&mut self) -> usize {
        self.refresh();
        self.seated.iter().flatten().count()
    }

    /// Announces a pass that will post jobs for `workers` workers, and wakes at most `workers` sleeping
    /// workers. Woken workers spin until [`Producer::rest`], within their own limit.
    pub fn announce(&self, workers: u32) {
        self.shared.control.header().signal.announced.store(workers, Relaxed);
        self.wake_workers(workers);
    }

    /// Ends the announced pass, so spinning workers may sleep.
    pub fn rest(&self) {
        self.shared.control.header().signal.announced.store(0, Relaxed);
    }

    /// Writes `x` to the beginning of the slab and opens the slices; first takes back the previous job.
    ///
    /// Each slice's sums must begin where those of the previous slice end, or later.
    ///
    /// # Errors
    /// Returns a [`PostError`] if the job does not fit the board.
    pub fn post(&mut self, x: &[f32], slices: &[Slice]) -> Result<(), PostError> {
        self.clear();
        self.check(x.len(), slices)?;
        self.shared.x.write(0, x);
        self.open(slices);
        Ok(())
    }

    /// Posts a job whose x another writer has put into the first `x_elements` elements of the slab
    /// ([`super::ActivationSlab`]). Unfinished slices of the previous job are taken back first.
    ///
    /// The writer must begin only after every slice of the previous job is done or taken back. This thread
    /// must have acquired the writer's release after the last element. Then workers see the new elements. A
    /// worker that is late with the previous job may read any mixture, and its sums are ignored.
    ///
    /// # Errors
    /// Returns a [`PostError`] if the job does not fit the board.
    pub fn post_in_place(&mut self, x_elements: usize, slices: &[Slice]) -> Result<(), PostError> {
        self.clear();
        self.check(x_elements, slices)?;
        self.open(slices);
        Ok(())
    }

    /// Takes back the current job and forgets its slices.
    fn clear(&mut self) {
        self.finish();
        self.slices.clear();
    }

    fn open(&mut self, slices: &[Slice]) {
        self.job = self.job.next();
        let opened = SliceWord { job: self.job, state: SlicePhase::Open }.encode();
        for (entry, slice) in self.shared.control.slices().iter().zip(slices) {
            entry.descriptor.write(slice);
            // SYNC POINT post: releases x and the descriptor.
            entry.progress.word.store(opened, Release);
            self.slices.push(PostedSlice { slice: *slice, end: SliceEnd::Pending });
        }
        let signal = &self.shared.control.header().signal;
        let posted = u32::try_from(slices.len()).unwrap_or(u32::MAX);
        signal.posted.store(posted, Relaxed);
        // SYNC POINT job: releases the table.
        signal.job.store(self.job.0, Release);
        self.wake_workers(posted);
    }

    fn check(&self, x_elements: usize, slices: &[Slice]) -> Result<(), PostError> {
        let geometry = self.shared.geometry;
        if slices.len() > geometry.slices {
            return Err(PostError::TooManySlices { slices: slices.len(), limit: geometry.slices });
        }
        if x_elements > geometry.x_elements {
            return Err(PostError::TooLargeX { elements: x_elements, limit: geometry.x_elements });
        }
        // Rows past the posted ones would be rows of another job.
        let posted = super::Geometry { x_elements, ..geometry };
        let mut end = 0;
        for (index, slice) in slices.iter().enumerate() {
            slice.check(&posted).map_err(|source| PostError::Slice { index, source })?;
            let sums = slice.sums_range();
            if sums.start < end {
                return Err(PostError::Overlap { index });
            }
            end = sums.end;
        }
        Ok(())
    }

    /// Wakes at most `count` sleeping workers; makes no system call if none sleeps.
    fn wake_workers(&self, count: u32) {
        // Pairs with the fence in `Consumer::park`, which says why no wake-up is lost.
        fence(SeqCst);
        let header = self.shared.control.header();
        let asleep = header.parked.seats.load(Relaxed).count_ones();
        if asleep > 0 && count > 0 {
            header.signal.bell.fetch_add(1, Release);
            futex::wake(&header.signal.bell, asleep.min(count));
        }
    }

    /// Returns the number of slices of the current job.
    #[must_use]
    pub fn slices(&self) -> usize {
        self.slices.len()
    }

    /// Returns the state of slice `index` of the current job.
    ///
    /// # Panics
    /// Panics if the job has no such slice.
    pub fn state(&mut self, index: usize) -> SliceState {
        match self.slices[index].end {
            SliceEnd::Done(worker) => SliceState::Done(worker),
            SliceEnd::Lost => SliceState::Lost,
            SliceEnd::Taken => SliceState::Taken,
            SliceEnd::Pending => {
                // SYNC POINT done: acquires the sums.
                let word = self.shared.control.slices()[index].progress.word.load(Acquire);
                self.judge(index, word)
            }
        }
    }

    /// Takes slice `index` back, unless it is done. Later writes of a worker to its state word are ignored.
    ///
    /// # Panics
    /// Panics if the job has no such slice.
    pub fn take_back(&mut self, index: usize) -> TakeBack {
        if self.slices[index].end == SliceEnd::Pending {
            let taken = SliceWord { job: self.job, state: SlicePhase::Taken }.encode();
            // A single swap instead of a loop, so that a peer that keeps changing the word cannot delay this
            // thread.
            // SYNC POINT done: acquires the sums. SYNC POINT claim: acquires the end of the descriptor's
            // copy.
            let word = self.shared.control.slices()[index].progress.word.swap(taken, AcqRel);
            if let SliceState::Claimed(worker) = self.judge(index, word) {
                self.tally_taken_back(worker);
            }
        }
        match self.slices[index].end {
            SliceEnd::Done(worker) => TakeBack::AlreadyDone(worker),
            SliceEnd::Pending | SliceEnd::Lost | SliceEnd::Taken => {
                self.slices[index].end = SliceEnd::Taken;
                TakeBack::Taken
            }
        }
    }

    /// Returns the sums of a done slice. Any thread may copy them until the next job is posted.
    ///
    /// # Errors
    /// Returns [`WorkerGone`] if the sums do not exist, or no longer.
    ///
    /// # Panics
    /// Panics if the job has no such slice.
    pub fn done(&mut self, index: usize) -> Result<SliceSums, WorkerGone> {
        let PostedSlice { slice, .. } = self.slices[index];
        let SliceState::Done(worker) = self.state(index) else { return Err(WorkerGone { index }) };
        self.refresh();
        let seated = self.find(worker).ok_or(WorkerGone { index })?;
        seated.tally.slices.add(1);
        seated.tally.rank_rows.add(slice.rank_rows());
        Ok(SliceSums::new(Arc::clone(&seated.sums), slice.sums_range()))
    }

    /// Takes back all unfinished slices. Sums of done slices can be read until the next job is posted.
    pub fn finish(&mut self) {
        for index in (0..self.slices.len()).rev() {
            self.take_back(index);
        }
    }

    /// Interprets a shared state word and settles the slice if the word is final.
    fn judge(&mut self, index: usize, word: u64) -> SliceState {
        self.refresh();
        let end = match SliceWord::decode(word) {
            Some(SliceWord { job, state }) if job == self.job => match state {
                SlicePhase::Open => return SliceState::Open,
                SlicePhase::Claimed(worker) if self.find(worker).is_some() => {
                    return SliceState::Claimed(worker);
                }
                SlicePhase::Done(worker) if self.find(worker).is_some() => SliceEnd::Done(worker),
                SlicePhase::Failed(worker) if self.find(worker).is_some() => {
                    self.tally_taken_back(worker);
                    SliceEnd::Lost
                }
                SlicePhase::Claimed(worker) | SlicePhase::Done(worker) | SlicePhase::Failed(worker)
                    if worker.get() <= self.issued =>
                {
                    // The worker was fenced in the meantime, which is no violation.
                    self.shared.late_words.add(1);
                    SliceEnd::Lost
                }
                // Only the executor takes slices back, and no worker has a number above `issued`.
                _ => self.violation(word),
            },
            _ => self.violation(word),
        };
        self.slices[index].end = end;
        match end {
            SliceEnd::Done(worker) => SliceState::Done(worker),
            _ => SliceState::Lost,
        }
    }

    /// Counts a word that no honest worker writes, and fences the worker that it names.
    fn violation(&mut self, word: u64) -> SliceEnd {
        self.shared.violations.add(1);
        if let Some(worker) = SliceWord::claimant(word) {
            self.shared.fence(worker);
        }
        SliceEnd::Lost
    }

    fn tally_taken_back(&self, worker: WorkerNumber) {
        if let Some(seated) = self.find(worker) {
            seated.tally.taken_back.add(1);
        }
    }

    fn find(&self, worker: WorkerNumber) -> Option<&AdmittedWorker> {
        self.seated.iter().flatten().find(|seated| seated.worker == worker)
    }

    /// Copies the table of worker slots if it has changed.
    fn refresh(&mut self) {
        // SYNC POINT seating: acquires the changes before this count.
        let changes = self.shared.changes.load(Acquire);
        if changes != self.changes {
            let seating = self.shared.lock();
            self.changes = self.shared.changes.load(Relaxed);
            self.issued = seating.issued;
            self.seated.clone_from_slice(&seating.seats);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::{Board, Geometry, WakeReason};
    use super::*;
    use std::time::Duration;

    const SLICE: Slice = Slice {
        image: 1,
        module: 0,
        first_row: 0,
        rows: 1,
        width: 2,
        first_rank: 0,
        last_rank: 16,
        x_offset: 0,
        sums_offset: 0,
        sums_elements: 2,
    };

    #[test]
    fn job_numbers_come_round_and_nobody_notices() {
        let geometry = Geometry { x_elements: 2, sums_elements: 16, slices: 1, seats: 2 };
        let (board, mut producer) = Board::in_process(geometry).unwrap();
        let (mut seat, mut late) =
            (board.seat().unwrap().join_in_process(), board.seat().unwrap().join_in_process());
        producer.post(&[1.0; 2], &[SLICE]).unwrap();
        // The late claim names job 1, a number that comes again.
        let claim = late.claim(|_, _| true).unwrap();
        producer.finish();
        producer.job = JobNumber(u32::MAX - 2);
        for job in [u32::MAX - 1, u32::MAX, 1, 2] {
            producer.post(&[1.0; 2], &[SLICE]).unwrap();
            assert_eq!(producer.job, JobNumber(job));
            assert!(!claim.is_wanted());
            assert_eq!(seat.wait(Duration::ZERO), WakeReason::Job);
            assert!(seat.claim(|_, _| true).unwrap().done(&[3.0; 2]));
            let mut sums = [0.0; 2];
            assert_eq!((producer.done(0).map(|done| done.read(0, &mut sums)), sums), (Ok(()), [3.0; 2]));
        }
        assert!(!claim.done(&[9.0; 2]));
        assert_eq!(board.stats().violations, 0);
    }

    #[test]
    fn a_board_that_has_used_every_generation_seats_nobody() {
        let geometry = Geometry { x_elements: 2, sums_elements: 16, slices: 1, seats: 1 };
        let (board, producer) = Board::in_process(geometry).unwrap();
        producer.shared.lock().issued = WorkerNumber::LAST.get() - 1;
        let last = board.seat().unwrap().worker;
        assert_eq!(last, WorkerNumber::LAST);
        assert!(board.fence(last));
        assert!(matches!(board.seat(), Err(super::super::BoardError::Exhausted)));
    }
}
