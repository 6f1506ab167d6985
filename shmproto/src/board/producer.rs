//! The engine thread's end of a board: it posts jobs and takes back what it does not want to wait for.

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

/// Why a job cannot be posted. The board is as it was, with no job on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PostError {
    /// More slices than the table has.
    #[error("{slices} slices are more than the {limit} of the board: cut the job into fewer")]
    TooManySlices {
        /// Slices of the job.
        slices: usize,
        /// Entries of the table.
        limit: usize,
    },
    /// More numbers than the slab holds.
    #[error("{elements} numbers of x are more than the {limit} of the board: post fewer rows")]
    TooLargeX {
        /// Numbers of x.
        elements: usize,
        /// Numbers in the slab.
        limit: usize,
    },
    /// A slice does not fit the board, or asks for rows that were not posted.
    #[error("slice {index} cannot be posted")]
    Slice {
        /// Its place in the job.
        index: usize,
        /// What is wrong with it.
        source: SliceError,
    },
    /// Two slices would write the same sums.
    #[error("the sums of slice {index} begin before those of the slice before it end: lay them out in order")]
    Overlap {
        /// The second of the two.
        index: usize,
    },
}

/// How far a slice is, as the executor believes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceState {
    /// Nobody has begun.
    Open,
    /// A worker that is admitted computes it.
    Claimed(WorkerNumber),
    /// The sums can be read.
    Done(WorkerNumber),
    /// Nobody will do it: the worker failed it, was fenced, or broke the protocol. To be taken back.
    Lost,
    /// It was taken back.
    Taken,
}

/// What became of taking a slice back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeBack {
    /// It is the caller's; whatever a worker still does to it counts for nothing.
    Taken,
    /// A worker was faster: the sums can be read.
    AlreadyDone(WorkerNumber),
}

/// The sums of a slice are not there: not done, taken back, or their worker was fenced. Compute them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the sums of slice {index} are not there: compute them here")]
pub struct WorkerGone {
    /// Its place in the list that was posted.
    pub index: usize,
}

/// The one end that posts jobs. One thread; only posting, [`Producer::announce`] and fencing a worker that broke
/// the protocol may call the system, and the first two only while somebody sleeps.
#[derive(Debug)]
pub struct Producer {
    shared: Arc<BoardShared>,
    job: JobNumber,
    /// The slices of the job. What counts is written here; the shared words only say what workers claim to have done.
    slices: Vec<PostedSlice>,
    /// Who is seated, as of `changes`.
    seated: Vec<Option<AdmittedWorker>>,
    issued: u32,
    changes: u64,
}

/// What the executor knows of a slice it posted.
#[derive(Debug, Clone, Copy)]
struct PostedSlice {
    slice: Slice,
    end: SliceEnd,
}

/// Whether a slice is settled, whatever the shared word says from then on.
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

    /// How large the board is.
    #[must_use]
    pub fn geometry(&self) -> super::Geometry {
        self.shared.geometry
    }

    /// How many workers are admitted.
    pub fn workers(&mut self) -> usize {
        self.refresh();
        self.seated.iter().flatten().count()
    }

    /// Says that a pass begins that will post jobs for `workers` of them, and wakes so many of those who sleep. They
    /// spin until [`Producer::rest`], as long as their own limit lets them.
    pub fn announce(&self, workers: u32) {
        self.shared.control.header().signal.announced.store(workers, Relaxed);
        self.wake_workers(workers);
    }

    /// Says that no more jobs come for now: who spins may sleep.
    pub fn rest(&self) {
        self.shared.control.header().signal.announced.store(0, Relaxed);
    }

    /// Posts a job: `x` is written to the slab, at its beginning, and the slices are opened. What is left of the job
    /// before is taken back first.
    ///
    /// The sums of the slices are laid out in order, so that each begins where the one before has ended or later.
    ///
    /// # Errors
    ///
    /// See [`PostError`].
    pub fn post(&mut self, x: &[f32], slices: &[Slice]) -> Result<(), PostError> {
        self.clear();
        self.check(x.len(), slices)?;
        self.shared.x.write(0, x);
        self.open(slices);
        Ok(())
    }

    /// Posts a job whose x somebody else has written: the first `x_elements` numbers of the slab ([`super::ActivationSlab`]). What
    /// is left of the job before is taken back first.
    ///
    /// Whoever wrote them did so after every slice of the job before was done or taken back, and this thread has
    /// acquired what the writer released after the last number. Then workers see these numbers, and those of them that
    /// are late with the job before see any mixture, which counts for nothing.
    ///
    /// # Errors
    ///
    /// See [`PostError`].
    pub fn post_in_place(&mut self, x_elements: usize, slices: &[Slice]) -> Result<(), PostError> {
        self.clear();
        self.check(x_elements, slices)?;
        self.open(slices);
        Ok(())
    }

    /// No job is on the board any more.
    fn clear(&mut self) {
        self.finish();
        self.slices.clear();
    }

    /// Opens the slices of the next job.
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
        // Rows past those posted are rows of another job.
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

    /// Wakes at most `count` of those who sleep; makes no system call if nobody does.
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

    /// Slices of the job on the board.
    #[must_use]
    pub fn slices(&self) -> usize {
        self.slices.len()
    }

    /// How far slice `index` of the job is.
    ///
    /// # Panics
    ///
    /// If the job has no such slice.
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

    /// Takes slice `index` back, unless it is done. Afterwards no worker's word about it counts.
    ///
    /// # Panics
    ///
    /// If the job has no such slice.
    pub fn take_back(&mut self, index: usize) -> TakeBack {
        if self.slices[index].end == SliceEnd::Pending {
            let taken = SliceWord { job: self.job, state: SlicePhase::Taken }.encode();
            // One swap and no loop: a peer that keeps changing the word holds nobody up.
            // SYNC POINT done: acquires the sums. SYNC POINT claim: acquires the end of the descriptor's copy.
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

    /// The sums of a slice that is done, to be copied by whoever has time, until the next job is posted.
    ///
    /// # Errors
    ///
    /// [`WorkerGone`] if they are not there, or not any more.
    ///
    /// # Panics
    ///
    /// If the job has no such slice.
    pub fn done(&mut self, index: usize) -> Result<SliceSums, WorkerGone> {
        let PostedSlice { slice, .. } = self.slices[index];
        let SliceState::Done(worker) = self.state(index) else { return Err(WorkerGone { index }) };
        self.refresh();
        let seated = self.find(worker).ok_or(WorkerGone { index })?;
        seated.tally.slices.add(1);
        seated.tally.rank_rows.add(slice.rank_rows());
        Ok(SliceSums::new(Arc::clone(&seated.sums), slice.sums_range()))
    }

    /// Takes back whatever is not done. Sums that are done can still be read, until the next job is posted.
    pub fn finish(&mut self) {
        for index in (0..self.slices.len()).rev() {
            self.take_back(index);
        }
    }

    /// What a shared word is worth. Settles the slice where it says something final.
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
                    // It was fenced in the meantime, and is not to blame.
                    self.shared.late_words.add(1);
                    SliceEnd::Lost
                }
                // Nobody but the executor takes back, and no worker has a number that was not given out.
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

    /// A word that no honest worker writes: counted, and the worker that it names is fenced.
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

    /// Looks who is seated, if that has changed.
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
        let (board, mut poster) = Board::in_process(geometry).unwrap();
        let (mut seat, mut late) =
            (board.seat().unwrap().join_in_process(), board.seat().unwrap().join_in_process());
        poster.post(&[1.0; 2], &[SLICE]).unwrap();
        // Its word names job 1, which comes again.
        let claim = late.claim(|_, _| true).unwrap();
        poster.finish();
        poster.job = JobNumber(u32::MAX - 2);
        for job in [u32::MAX - 1, u32::MAX, 1, 2] {
            poster.post(&[1.0; 2], &[SLICE]).unwrap();
            assert_eq!(poster.job, JobNumber(job));
            assert!(!claim.is_wanted());
            assert_eq!(seat.wait(Duration::ZERO), WakeReason::Job);
            assert!(seat.claim(|_, _| true).unwrap().done(&[3.0; 2]));
            let mut sums = [0.0; 2];
            assert_eq!((poster.done(0).map(|done| done.read(0, &mut sums)), sums), (Ok(()), [3.0; 2]));
        }
        assert!(!claim.done(&[9.0; 2]));
        assert_eq!(board.figures().violations, 0);
    }

    #[test]
    fn a_board_that_has_used_every_generation_seats_nobody() {
        let geometry = Geometry { x_elements: 2, sums_elements: 16, slices: 1, seats: 1 };
        let (board, poster) = Board::in_process(geometry).unwrap();
        poster.shared.lock().issued = WorkerNumber::LAST.get() - 1;
        let last = board.seat().unwrap().worker;
        assert_eq!(last, WorkerNumber::LAST);
        assert!(board.fence(last));
        assert!(matches!(board.seat(), Err(super::super::BoardError::Exhausted)));
    }
}
