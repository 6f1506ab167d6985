//! Connections that have not opened a session yet: so many and no more. A newcomer never waits for the idle: when the
//! lobby is full, whoever has been in it longest must go.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::task::AbortHandle;

/// Those in the lobby, by arrival.
#[derive(Debug, Clone, Default)]
pub(super) struct Lobby(Arc<Mutex<Guests>>);

#[derive(Debug, Default)]
struct Guests {
    arrivals: u64,
    present: BTreeMap<u64, AbortHandle>,
}

/// A place in the lobby, free when dropped.
#[derive(Debug)]
pub(super) struct Place {
    lobby: Lobby,
    number: u64,
}

impl Lobby {
    /// The place of somebody who arrives.
    pub(super) fn place(&self) -> Place {
        let mut guests = self.guests();
        guests.arrivals += 1;
        Place { lobby: self.clone(), number: guests.arrivals }
    }

    /// Seats the task that serves the place. If there are more than `most`, the oldest are ended.
    pub(super) fn seat(&self, number: u64, task: AbortHandle, most: usize) {
        let mut guests = self.guests();
        guests.present.insert(number, task);
        while guests.present.len() > most {
            if let Some((_, oldest)) = guests.present.pop_first() {
                oldest.abort();
                tracing::debug!(most, "a connection without a session made room for a new one");
            }
        }
    }

    fn guests(&self) -> MutexGuard<'_, Guests> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.lobby.guests().present.remove(&self.number);
    }
}
