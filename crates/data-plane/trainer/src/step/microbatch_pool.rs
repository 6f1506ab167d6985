//! Concurrent trainers: while one waits for the layer service, another computes.
//!
//! Microbatches start in order, each as soon as a lane is free and the row limit permits. The choice of the
//! lane does not change a result, and results are returned in the order of microbatches.

use std::{
    collections::VecDeque,
    error::Error,
    panic::resume_unwind,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use model::{
    backward::{TrainError, Trainer},
    cpu::Compute,
    forward::{ModelContext, ReverseLayers},
};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::{BATCH_ROWS, KEPT_ROWS};

/// A base whose linear layers another process computes, as a lane uses it.
pub trait BorrowedBase: ReverseLayers<Compute, Error: Error + Send + 'static> + Send {}

impl<B: ReverseLayers<Compute, Error: Error + Send + 'static> + Send> BorrowedBase for B {}

/// A trainer with its own session of the layer service; a pool runs each on a thread of its own.
#[derive(Debug)]
pub struct MicrobatchWorker<B> {
    pub trainer: Trainer<B>,
    /// Core to which the thread is pinned; `None` does not pin.
    pub core: Option<usize>,
}

/// Lanes of one job, each of which can take any microbatch.
#[derive(Debug)]
pub struct MicrobatchPool<B> {
    /// Lane of the calling thread.
    first: MicrobatchWorker<B>,
    others: Vec<MicrobatchWorker<B>>,
}

impl<B> From<Trainer<B>> for MicrobatchPool<B> {
    fn from(trainer: Trainer<B>) -> Self {
        Self { first: MicrobatchWorker { trainer, core: None }, others: Vec::new() }
    }
}

impl<B: BorrowedBase> MicrobatchPool<B> {
    #[must_use]
    pub fn new(first: MicrobatchWorker<B>, others: Vec<MicrobatchWorker<B>>) -> Self {
        Self { first, others }
    }

    /// Returns the model without its linear layers.
    #[must_use]
    pub fn model(&self) -> &ModelContext {
        self.first.trainer.model()
    }

    /// Runs `work` with each of `parts`, and returns results in order; no part starts after a failure.
    ///
    /// # Errors
    /// Returns the first error, in the order of parts.
    pub(super) fn each<P: RowCount + Send, T: Send>(
        &mut self,
        parts: impl IntoIterator<Item = P>,
        work: impl Fn(&mut Trainer<B>, P) -> Result<T, TrainError<B::Error>> + Sync,
    ) -> Result<Vec<T>, TrainError<B::Error>> {
        let queue = MicrobatchQueue::of(parts);
        let (first, others, count) = (&mut self.first, &mut self.others, queue.len());
        let mut done = thread::scope(|scope| {
            let start = |lane| {
                let work = || MicrobatchWorker::work(lane, &queue, &work);
                // If a thread cannot start, the pool is slower but correct.
                thread::Builder::new().name("lane".to_owned()).spawn_scoped(scope, work).ok()
            };
            let others: Vec<_> = others.iter_mut().take(count.saturating_sub(1)).filter_map(start).collect();
            let mut done = first.work(&queue, &work);
            for lane in others {
                done.extend(lane.join().unwrap_or_else(|panic| resume_unwind(panic)));
            }
            done
        });
        done.sort_by_key(|(number, _)| *number);
        done.into_iter().map(|(_, came)| came).collect()
    }
}

impl<B> MicrobatchWorker<B> {
    /// Runs parts until none is left, and returns the results with the parts' numbers.
    fn work<P: RowCount, T, E>(
        &mut self,
        queue: &MicrobatchQueue<P>,
        work: impl Fn(&mut Trainer<B>, P) -> Result<T, E>,
    ) -> Vec<(usize, Result<T, E>)> {
        self.pin();
        let mut done = Vec::new();
        while let Some(TakenMicrobatch { number, part, permit }) = queue.take() {
            let came = work(&mut self.trainer, part);
            if came.is_err() {
                queue.stop();
            }
            drop(permit);
            done.push((number, came));
        }
        done
    }

    /// Pins the current thread to the lane's core: the threads of a step are new, or were another lane's.
    fn pin(&self) {
        let Some(core) = self.core.filter(|&core| core < CpuSet::MAX_CPU) else { return };
        let mut set = CpuSet::new();
        set.set(core);
        // A core that this process may not use costs speed, not correctness.
        let _ = sched_setaffinity(None, &set);
    }
}

pub(super) trait RowCount {
    /// Returns the rows that go through the model together.
    fn rows(&self) -> usize;
}

impl<P: RowCount, T> RowCount for (P, T) {
    fn rows(&self) -> usize {
        self.0.rows()
    }
}

/// Parts that have not started, and the rows under way.
struct MicrobatchQueue<P> {
    state: Mutex<MicrobatchState<P>>,
    /// Signals that rows have become free, or that the queue has stopped.
    changed: Condvar,
}

struct MicrobatchState<P> {
    waiting: VecDeque<(usize, P)>,
    /// Rows of the parts under way.
    rows: usize,
    is_stopped: bool,
}

struct TakenMicrobatch<'q, P> {
    number: usize,
    part: P,
    permit: RowPermit<'q, P>,
}

/// Rows under way, until this is dropped.
struct RowPermit<'q, P> {
    queue: &'q MicrobatchQueue<P>,
    rows: usize,
}

impl<P> MicrobatchQueue<P> {
    fn lock(&self) -> MutexGuard<'_, MicrobatchState<P>> {
        // Each change is a single step, so a poisoned lock still holds a valid state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len(&self) -> usize {
        self.lock().waiting.len()
    }

    /// Prevents further parts from starting.
    fn stop(&self) {
        self.lock().is_stopped = true;
        self.changed.notify_all();
    }
}

impl<P: RowCount> MicrobatchQueue<P> {
    fn of(parts: impl IntoIterator<Item = P>) -> Self {
        let waiting = parts.into_iter().enumerate().collect();
        let state = Mutex::new(MicrobatchState { waiting, rows: 0, is_stopped: false });
        Self { state, changed: Condvar::new() }
    }

    /// Returns the next part once the row limit permits; `None` if no more part will start. All parts before
    /// a running one are running or done, so a part may wait for an earlier one.
    fn take(&self) -> Option<TakenMicrobatch<'_, P>> {
        let mut state = self.lock();
        loop {
            let (_, next) = state.waiting.front().filter(|_| !state.is_stopped)?;
            let rows = share(next.rows());
            if state.rows + rows <= KEPT_ROWS {
                state.rows += rows;
                let (number, part) = state.waiting.pop_front()?;
                return Some(TakenMicrobatch { number, part, permit: RowPermit { queue: self, rows } });
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Returns the rows that a part of `rows` rows counts as. A part above [`BATCH_ROWS`] takes the whole limit,
/// so that two such parts never need their memory at once.
fn share(rows: usize) -> usize {
    if rows > BATCH_ROWS { KEPT_ROWS } else { rows }
}

impl<P> Drop for RowPermit<'_, P> {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.rows -= self.rows;
        state.is_stopped |= thread::panicking();
        drop(state);
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl RowCount for usize {
        fn rows(&self) -> usize {
            *self
        }
    }

    #[test]
    fn parts_take_no_more_room_than_there_is_and_one_that_is_larger_than_usual_takes_all() {
        let parts = [512, 500, 3, 600, 512, 513, 7, 5000, 5001, 1, 511, 512, 512];
        let (queue, under_way) = (MicrobatchQueue::of(parts), Mutex::new(0));
        let work = || {
            while let Some(TakenMicrobatch { part, permit, .. }) = queue.take() {
                let now = {
                    let mut rows = under_way.lock().unwrap();
                    *rows += part;
                    *rows
                };
                assert!(if part > BATCH_ROWS { now == part } else { now <= KEPT_ROWS }, "{part} of {now}");
                thread::yield_now();
                *under_way.lock().unwrap() -= part;
                drop(permit);
            }
        };
        thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(work))));
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn nothing_begins_behind_what_has_failed_or_panicked() {
        let queue = MicrobatchQueue::of([512, 512, 512]);
        let held = [queue.take().unwrap(), queue.take().unwrap()];
        thread::scope(|scope| {
            let waits = scope.spawn(|| queue.take().is_none());
            queue.stop();
            assert!(waits.join().unwrap());
        });
        drop(held);
        assert!(queue.take().is_none());
        let queue = MicrobatchQueue::of([512, 1]);
        thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _held = queue.take();
                panic!("while the part is under way");
            });
            assert!(panics.join().is_err());
        });
        assert!(queue.take().is_none());
    }
}
