//! Trainers side by side: while one waits for the base layers, another computes.
//!
//! Parts of a step begin in their order, each as soon as a lane is free and there is room for its rows. Which lane takes a part
//! changes nothing of it, and what came of all of them is given in their order.

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

/// Base layers of somebody else, as a lane uses them.
pub trait BorrowedBase: ReverseLayers<Compute, Error: Error + Send + 'static> + Send {}

impl<B: ReverseLayers<Compute, Error: Error + Send + 'static> + Send> BorrowedBase for B {}

/// A trainer with base layers of its own, and a thread for as long as there is something to do.
#[derive(Debug)]
pub struct MicrobatchWorker<B> {
    /// What takes parts through the model.
    pub trainer: Trainer<B>,
    /// Where its thread computes; anywhere if none is said.
    pub core: Option<usize>,
}

/// Lanes of one job, of which each can take any part.
#[derive(Debug)]
pub struct MicrobatchPool<B> {
    /// That of the thread that asks.
    first: MicrobatchWorker<B>,
    others: Vec<MicrobatchWorker<B>>,
}

impl<B> From<Trainer<B>> for MicrobatchPool<B> {
    fn from(trainer: Trainer<B>) -> Self {
        Self { first: MicrobatchWorker { trainer, core: None }, others: Vec::new() }
    }
}

impl<B: BorrowedBase> MicrobatchPool<B> {
    /// One lane, and others beside it.
    #[must_use]
    pub fn new(first: MicrobatchWorker<B>, others: Vec<MicrobatchWorker<B>>) -> Self {
        Self { first, others }
    }

    /// The model without its linear layers.
    #[must_use]
    pub fn model(&self) -> &ModelContext {
        self.first.trainer.model()
    }

    /// Does `work` with each of `parts`, and gives what came of them in their order. Once it fails, no other part begins.
    ///
    /// # Errors
    /// The first, in the order of parts.
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
                // A thread that is refused costs speed, nothing else.
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
    /// Takes parts as long as there are any; what came of each, by its number.
    fn work<P: RowCount, T, E>(
        &mut self,
        queue: &MicrobatchQueue<P>,
        work: impl Fn(&mut Trainer<B>, P) -> Result<T, E>,
    ) -> Vec<(usize, Result<T, E>)> {
        self.pin();
        let mut done = Vec::new();
        while let Some(TakenMicrobatch { number, part, room }) = queue.take() {
            let came = work(&mut self.trainer, part);
            if came.is_err() {
                queue.stop();
            }
            drop(room);
            done.push((number, came));
        }
        done
    }

    /// Puts the thread where the lane computes: each step's may be another, or come from that of another lane.
    fn pin(&self) {
        let Some(core) = self.core.filter(|&core| core < CpuSet::MAX_CPU) else { return };
        let mut set = CpuSet::new();
        set.set(core);
        // A core that this process may not use costs speed, not correctness.
        let _ = sched_setaffinity(None, &set);
    }
}

/// What takes memory while it is under way.
pub(super) trait RowCount {
    /// Rows that go through the model together.
    fn rows(&self) -> usize;
}

impl<P: RowCount, T> RowCount for (P, T) {
    fn rows(&self) -> usize {
        self.0.rows()
    }
}

/// Parts that have not begun, and how much room there is for them.
struct MicrobatchQueue<P> {
    state: Mutex<MicrobatchState<P>>,
    /// There is more room, or nothing will begin any more.
    changed: Condvar,
}

struct MicrobatchState<P> {
    waiting: VecDeque<(usize, P)>,
    /// Of the parts under way.
    rows: usize,
    is_stopped: bool,
}

/// A part that has begun.
struct TakenMicrobatch<'q, P> {
    number: usize,
    part: P,
    room: RowPermit<'q, P>,
}

/// Rows under way, until this is dropped.
struct RowPermit<'q, P> {
    queue: &'q MicrobatchQueue<P>,
    rows: usize,
}

impl<P> MicrobatchQueue<P> {
    fn lock(&self) -> MutexGuard<'_, MicrobatchState<P>> {
        // Whoever has it changes it in one go.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len(&self) -> usize {
        self.lock().waiting.len()
    }

    /// No other part begins.
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

    /// The next part, once there is room for it; `None` if none will begin any more. Parts that are under way so have all those
    /// before them under way or done, and may wait for them.
    fn take(&self) -> Option<TakenMicrobatch<'_, P>> {
        let mut state = self.lock();
        loop {
            let (_, next) = state.waiting.front().filter(|_| !state.is_stopped)?;
            let rows = share(next.rows());
            if state.rows + rows <= KEPT_ROWS {
                state.rows += rows;
                let (number, part) = state.waiting.pop_front()?;
                return Some(TakenMicrobatch { number, part, room: RowPermit { queue: self, rows } });
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The room that so many rows take: all of it if they are more than usual, whose memory is not taken twice.
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
            while let Some(TakenMicrobatch { part, room, .. }) = queue.take() {
                let now = {
                    let mut rows = under_way.lock().unwrap();
                    *rows += part;
                    *rows
                };
                assert!(if part > BATCH_ROWS { now == part } else { now <= KEPT_ROWS }, "{part} of {now}");
                thread::yield_now();
                *under_way.lock().unwrap() -= part;
                drop(room);
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
