//! One executor, as the routing policy and the lifecycle see it.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use shmproto::message::Welcome;

use super::load_tracker::LoadTracker;
use crate::{executor::Executor, lock::lock};

#[derive(Debug, Clone)]
pub enum ExecutorState {
    /// Not ready yet, or not ready again.
    Starting {
        stage: String,
        /// Progress in percent, 0 to 100, if it is known.
        percent: Option<u32>,
    },
    /// The executor was ready and has disconnected.
    Lost {
        /// How the connection ended, in readable form.
        detail: String,
    },
    /// Connected, but not used because it differs from the others.
    Refused {
        detail: String,
    },
    Ready(ReadyExecutor),
}

/// A ready executor with its connection.
#[derive(Debug, Clone)]
pub struct ReadyExecutor {
    pub index: usize,
    pub epoch: u64,
    pub welcome: Arc<Welcome>,
}

#[derive(Debug)]
pub struct ExecutorHandle {
    index: usize,
    name: String,
    executor: Executor,
    state: Mutex<ExecutorState>,
    books: LoadTracker,
    drained: AtomicBool,
    /// Number of requests sent to the executor; `taken_over` counts sequences that other executors lost.
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

    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    #[must_use]
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    #[must_use]
    pub(crate) fn books(&self) -> &LoadTracker {
        &self.books
    }

    /// State of the executor, as the lifecycle last set it.
    #[must_use]
    pub fn state(&self) -> ExecutorState {
        lock(&self.state).clone()
    }

    pub(crate) fn set_state(&self, state: ExecutorState) {
        *lock(&self.state) = state;
        self.executor.capacity_changed();
    }

    /// Keeps requests from an executor that ends, until another process takes its place.
    pub(crate) fn fall_asleep(&self) {
        self.set_state(ExecutorState::Starting { stage: "asleep".to_owned(), percent: None });
    }

    #[must_use]
    pub(crate) fn is_ready(&self) -> bool {
        matches!(&*lock(&self.state), ExecutorState::Ready(_))
    }

    /// Whether new requests are kept from the executor.
    #[must_use]
    pub(crate) fn is_drained(&self) -> bool {
        self.drained.load(Relaxed)
    }

    /// Whether the executor accepts new requests.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_ready() && !self.is_drained()
    }

    /// Keeps new requests from the executor from now on.
    pub(crate) fn drain(&self) {
        self.drained.store(true, Relaxed);
    }

    pub(crate) fn undrain(&self) {
        self.drained.store(false, Relaxed);
        self.executor.capacity_changed();
    }

    pub(crate) fn count_request(&self) {
        self.chosen.fetch_add(1, Relaxed);
    }

    /// Counts a sequence that the executor resumes after another executor lost it.
    pub(crate) fn count_taken_over(&self) {
        self.taken_over.fetch_add(1, Relaxed);
    }

    /// Number of requests sent to the executor, and of sequences taken over from other executors.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.chosen.load(Relaxed), self.taken_over.load(Relaxed))
    }
}
