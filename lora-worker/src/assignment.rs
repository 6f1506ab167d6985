//! Where the thread that computes is sent: a seat, and what comes with it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use shmproto::{board::Consumer, fd_passing::WorkerEnd};

use crate::library::Handoff;

/// A seat, and what comes with it.
#[derive(Debug)]
pub(crate) struct Assignment {
    pub(crate) seat: Consumer,
    pub(crate) handoff: Arc<Handoff>,
    /// Shut down when the seat is lost, so that the other thread asks for a new one.
    pub(crate) connection: Arc<WorkerEnd>,
    pub(crate) over: Arc<AtomicBool>,
}

/// Ends a post when it is dropped.
#[derive(Debug)]
pub(crate) struct AssignmentGuard(Arc<AtomicBool>);

impl Assignment {
    /// A seat on the board of whoever is at the other end of `connection`; adapters come by way of the handoff.
    pub(crate) fn new(seat: Consumer, handoff: Arc<Handoff>, connection: Arc<WorkerEnd>) -> Self {
        Self { seat, handoff, connection, over: Arc::default() }
    }

    /// What the other thread keeps for as long as the post is to be attended.
    pub(crate) fn end(&self) -> AssignmentGuard {
        AssignmentGuard(Arc::clone(&self.over))
    }
}

impl Drop for AssignmentGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
