//! One executor, as those see it who choose among several.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use shmproto::message::Welcome;

use super::load_tracker::LoadTracker;
use crate::{executor::Executor, lock::lock};

/// Whether an executor can be used.
#[derive(Debug, Clone)]
pub enum ExecutorState {
    /// Not yet, or not again.
    Starting {
        /// What is being waited for.
        stage: String,
        /// How much of it is done, 0 to 100, if that is known.
        percent: Option<u32>,
    },
    /// It was there and is gone.
    Lost {
        /// How the connection ended, for a person.
        detail: String,
    },
    /// It is there, and may not be used: why, for a person.
    Refused {
        /// What differs from the others.
        detail: String,
    },
    /// It is used.
    Ready(ReadyExecutor),
}

/// An executor that can be used, over one connection.
#[derive(Debug, Clone)]
pub struct ReadyExecutor {
    /// Its place among the executors.
    pub index: usize,
    /// Number of the connection.
    pub epoch: u64,
    /// What it said of itself.
    pub welcome: Arc<Welcome>,
}

/// See the module's description.
#[derive(Debug)]
pub struct ExecutorHandle {
    index: usize,
    name: String,
    executor: Executor,
    state: Mutex<ExecutorState>,
    books: LoadTracker,
    /// True if it gets no new requests.
    drained: AtomicBool,
    /// Requests it was sent, and sequences others had lost.
    chosen: AtomicU64,
    taken_over: AtomicU64,
}

impl ExecutorHandle {
    pub(super) fn new(index: usize, name: String, executor: Executor) -> Self {
        let state =
            ExecutorState::Starting { stage: "waiting for the base-executor".to_owned(), percent: None };
        Self {
            index,
            name,
            executor,
            state: Mutex::new(state),
            books: LoadTracker::default(),
            drained: AtomicBool::new(false),
            chosen: AtomicU64::new(0),
            taken_over: AtomicU64::new(0),
        }
    }

    /// Its place among the executors.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// What people call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The connection to it.
    #[must_use]
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// What it has to do, and what it takes for it.
    #[must_use]
    pub fn books(&self) -> &LoadTracker {
        &self.books
    }

    /// Whether it can be used, as the lifecycle saw it last.
    #[must_use]
    pub fn state(&self) -> ExecutorState {
        lock(&self.state).clone()
    }

    pub(crate) fn set_state(&self, state: ExecutorState) {
        *lock(&self.state) = state;
        self.executor.room_changed();
    }

    /// Whether it can be used.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(&*lock(&self.state), ExecutorState::Ready(_))
    }

    /// Whether it is kept from new requests.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.drained.load(Relaxed)
    }

    /// Whether it is used for new requests.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_ready() && !self.is_drained()
    }

    /// From now on it gets no new requests.
    pub fn drain(&self) {
        self.drained.store(true, Relaxed);
    }

    /// It gets requests again.
    pub fn undrain(&self) {
        self.drained.store(false, Relaxed);
        self.executor.room_changed();
    }

    /// It was sent a request.
    pub(crate) fn count_request(&self) {
        self.chosen.fetch_add(1, Relaxed);
    }

    /// It goes on with a sequence that another one lost.
    pub(crate) fn count_taken_over(&self) {
        self.taken_over.fetch_add(1, Relaxed);
    }

    /// Requests it was sent, and sequences it took over from others.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.chosen.load(Relaxed), self.taken_over.load(Relaxed))
    }
}
