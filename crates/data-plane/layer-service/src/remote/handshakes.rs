//! Connections without a session, limited in number: a new one closes the oldest, so idle ones never block.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::task::AbortHandle;

/// Connections without a session, by arrival.
#[derive(Debug, Clone, Default)]
pub(super) struct Handshakes(Arc<Mutex<Pending>>);

#[derive(Debug, Default)]
struct Pending {
    arrivals: u64,
    present: BTreeMap<u64, AbortHandle>,
}

/// Registration of one handshake, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Handshake {
    all: Handshakes,
    number: u64,
}

impl Handshakes {
    pub(super) fn begin(&self) -> Handshake {
        let mut pending = self.pending();
        pending.arrivals += 1;
        Handshake { all: self.clone(), number: pending.arrivals }
    }

    /// Records the task of a handshake. If there are more than `most`, the oldest are aborted.
    pub(super) fn register(&self, number: u64, task: AbortHandle, most: usize) {
        let mut pending = self.pending();
        pending.present.insert(number, task);
        while pending.present.len() > most {
            if let Some((_, oldest)) = pending.present.pop_first() {
                oldest.abort();
                tracing::debug!(most, "closed a connection without a session, to accept a new one");
            }
        }
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handshake {
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.all.pending().present.remove(&self.number);
    }
}
