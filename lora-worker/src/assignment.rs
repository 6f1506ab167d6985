//! A worker slot and its connection, as the control thread passes them to the compute thread.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use shmproto::{board::Consumer, fd_passing::WorkerEnd};

use crate::library::Handoff;

#[derive(Debug)]
pub(crate) struct Assignment {
    pub(crate) seat: Consumer,
    pub(crate) handoff: Arc<Handoff>,
    /// Shut down when the executor fences the worker, so that the control thread asks for a new slot.
    pub(crate) connection: Arc<WorkerEnd>,
    pub(crate) over: Arc<AtomicBool>,
}

/// Ends an assignment on drop.
#[derive(Debug)]
pub(crate) struct AssignmentGuard(Arc<AtomicBool>);

impl Assignment {
    pub(crate) fn new(seat: Consumer, handoff: Arc<Handoff>, connection: Arc<WorkerEnd>) -> Self {
        Self { seat, handoff, connection, over: Arc::default() }
    }

    /// Returns a guard that the control thread keeps while the assignment is valid.
    pub(crate) fn end(&self) -> AssignmentGuard {
        AssignmentGuard(Arc::clone(&self.over))
    }
}

impl Drop for AssignmentGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
