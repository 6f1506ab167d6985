//! Jobs of a copy engine: queued, being copied, or ended but not reported.
//!
//! A load has one owner: this queue, or one thread that copies or drops it. So a cancellation is final.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{CopyEnd, CopyPriority, CopySource, SubmitError};

pub(super) type DoneCallback = Box<dyn FnOnce(CopyEnd) + Send>;

/// Id of a job in an engine; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct JobId(u64);

pub(super) struct Submission {
    pub(super) class: CopyPriority,
    pub(super) load: Box<dyn CopySource>,
    pub(super) done: DoneCallback,
    pub(super) ended: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NextPiece {
    pub(super) job: JobId,
    /// `None` if the job has nothing to copy.
    pub(super) bytes: Option<usize>,
    /// Time at which the job was submitted.
    pub(super) ready: Duration,
    pub(super) class: CopyPriority,
}

impl NextPiece {
    /// Whether the piece yields to foreground reads on its disk.
    pub(super) fn gives_way(&self) -> bool {
        self.class != CopyPriority::Demand && self.bytes.is_some()
    }
}

/// Position of a job in the queue: by class, then by arrival in the class.
type QueueOrder = (CopyPriority, u64);

struct CopyJob {
    place: QueueOrder,
    /// `None` while a thread holds the load.
    load: Option<Box<dyn CopySource>>,
    /// Size of the next piece; `None` if nothing is left.
    next_bytes: Option<usize>,
    ready: Duration,
    cancelled: bool,
    done: DoneCallback,
    ended: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EndedCounts {
    pub(super) done: u64,
    pub(super) cancelled: u64,
    pub(super) failed: u64,
}

pub(super) struct CopyQueue {
    jobs: HashMap<JobId, CopyJob>,
    /// Jobs that have pieces left, the most urgent first.
    order: BTreeMap<QueueOrder, JobId>,
    /// Ended jobs whose owners were not yet called.
    farewells: VecDeque<(DoneCallback, CopyEnd)>,
    ended: EndedCounts,
    max_jobs: usize,
    /// Number of submissions and raises: the source of ids and positions.
    arrivals: u64,
}

impl CopyQueue {
    pub(super) fn new(max_jobs: usize) -> Self {
        Self {
            jobs: HashMap::new(),
            order: BTreeMap::new(),
            farewells: VecDeque::new(),
            ended: EndedCounts::default(),
            max_jobs,
            arrivals: 0,
        }
    }

    pub(super) fn check_room(&self) -> Result<(), SubmitError> {
        if self.jobs.len() + self.farewells.len() >= self.max_jobs {
            return Err(SubmitError::Full { limit: self.max_jobs });
        }
        Ok(())
    }

    pub(super) fn push(&mut self, submission: Submission, next_bytes: Option<usize>, now: Duration) -> JobId {
        let Submission { class, load, done, ended } = submission;
        let place = (class, self.arrival());
        let id = JobId(place.1);
        let job = CopyJob { place, load: Some(load), next_bytes, ready: now, cancelled: false, done, ended };
        self.jobs.insert(id, job);
        self.order.insert(place, id);
        id
    }

    pub(super) fn first(&self) -> Option<NextPiece> {
        let (_, &job) = self.order.first_key_value()?;
        let known = self.jobs.get(&job)?;
        Some(NextPiece { job, bytes: known.next_bytes, ready: known.ready, class: known.place.0 })
    }

    /// Moves a job to the end of a more urgent class; never to a less urgent one.
    pub(super) fn raise(&mut self, id: JobId, class: CopyPriority) {
        let arrival = self.arrival();
        let Some(job) = self.jobs.get_mut(&id).filter(|job| class < job.place.0) else { return };
        if self.order.remove(&job.place).is_some() {
            job.place = (class, arrival);
            self.order.insert(job.place, id);
        }
    }

    /// Takes the load to copy a piece; `None` if the job was cancelled or has ended.
    pub(super) fn take(&mut self, id: JobId) -> Option<Box<dyn CopySource>> {
        self.jobs.get_mut(&id)?.load.take()
    }

    /// Returns a load with more pieces to the queue; gives it back if its job was cancelled meanwhile.
    pub(super) fn put_back(
        &mut self,
        id: JobId,
        load: Box<dyn CopySource>,
        next_bytes: usize,
    ) -> Option<Box<dyn CopySource>> {
        match self.jobs.get_mut(&id) {
            Some(job) if !job.cancelled => {
                job.load = Some(load);
                job.next_bytes = Some(next_bytes);
                None
            }
            _ => Some(load),
        }
    }

    /// Ensures that no further piece is taken. Returns the load, which the caller must drop before it
    /// [`end`](Self::end)s the job; `None` if the job has ended, or another thread will end it.
    pub(super) fn cancel(&mut self, id: JobId) -> Option<Box<dyn CopySource>> {
        let job = self.jobs.get_mut(&id)?;
        job.cancelled = true;
        self.order.remove(&job.place);
        job.load.take()
    }

    /// Ends a job whose load is dropped, and queues the call of its owner.
    pub(super) fn end(&mut self, id: JobId, end: CopyEnd) {
        let Some(job) = self.jobs.remove(&id) else { return };
        self.order.remove(&job.place);
        match end {
            CopyEnd::Done => self.ended.done += 1,
            CopyEnd::Cancelled => self.ended.cancelled += 1,
            CopyEnd::Failed => self.ended.failed += 1,
        }
        job.ended.store(true, Ordering::Release);
        self.farewells.push_back((job.done, end));
    }

    pub(super) fn lives(&self, id: JobId) -> bool {
        self.jobs.contains_key(&id)
    }

    /// Returns the next owner to call.
    pub(super) fn farewell(&mut self) -> Option<(DoneCallback, CopyEnd)> {
        self.farewells.pop_front()
    }

    /// Whether every job has ended and every owner was called.
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.farewells.is_empty()
    }

    pub(super) fn has_work(&self) -> bool {
        !self.order.is_empty() || !self.farewells.is_empty()
    }

    /// Whether all work yields to foreground reads.
    pub(super) fn gives_way(&self) -> bool {
        self.farewells.is_empty() && self.first().is_some_and(|piece| piece.gives_way())
    }

    pub(super) fn ended(&self) -> EndedCounts {
        self.ended
    }

    pub(super) fn queued(&self, class: CopyPriority) -> usize {
        self.order.range((class, 0)..=(class, u64::MAX)).count()
    }

    fn arrival(&mut self) -> u64 {
        self.arrivals += 1;
        self.arrivals
    }
}
