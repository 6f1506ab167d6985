//! Connections that have not opened a session yet: so many and no more. A newcomer never waits for the idle: when all
//! places are taken, whoever has had one longest must go.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::task::AbortHandle;

/// Those without a session, by arrival.
#[derive(Debug, Clone, Default)]
pub(super) struct Handshakes(Arc<Mutex<Pending>>);

#[derive(Debug, Default)]
struct Pending {
    arrivals: u64,
    present: BTreeMap<u64, AbortHandle>,
}

/// A place among them, free when dropped.
#[derive(Debug)]
pub(super) struct Handshake {
    all: Handshakes,
    number: u64,
}

impl Handshakes {
    /// The place of somebody who arrives.
    pub(super) fn begin(&self) -> Handshake {
        let mut pending = self.pending();
        pending.arrivals += 1;
        Handshake { all: self.clone(), number: pending.arrivals }
    }

    /// Notes the task that serves the place. If there are more than `most`, the oldest are ended.
    pub(super) fn register(&self, number: u64, task: AbortHandle, most: usize) {
        let mut pending = self.pending();
        pending.present.insert(number, task);
        while pending.present.len() > most {
            if let Some((_, oldest)) = pending.present.pop_first() {
                oldest.abort();
                tracing::debug!(most, "a connection without a session made room for a new one");
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
