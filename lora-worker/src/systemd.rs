//! What the process tells systemd: that it has started, what it does, that it lives, that it ends.
//!
//! Without `NOTIFY_SOCKET` nothing is said. A worker is ready when it is on its core and looks for an executor: one that
//! waits has started well, and systemd should not wait with it. The watchdog is fed only while the thread that computes
//! turns (`signals`).

use sd_notify::NotifyState;

use crate::thread_status::ConsumerStatus;

/// The process is on its core and looks for an executor.
pub(crate) fn ready() {
    notify_systemd(&[NotifyState::Ready, NotifyState::Status(&in_words(ConsumerStatus::Waiting))]);
}

/// What it does has changed.
pub(crate) fn status(seating: ConsumerStatus) {
    notify_systemd(&[NotifyState::Status(&in_words(seating))]);
}

/// The thread that computes has turned.
pub(crate) fn alive() {
    notify_systemd(&[NotifyState::Watchdog]);
}

/// The process is about to end.
pub(crate) fn stopping() {
    notify_systemd(&[NotifyState::Stopping]);
}

fn in_words(seating: ConsumerStatus) -> String {
    match seating {
        ConsumerStatus::Waiting => "waiting for an executor".to_owned(),
        ConsumerStatus::Seated { adapters } => format!("seated, with {adapters} adapters"),
    }
}

fn notify_systemd(state: &[NotifyState<'_>]) {
    // It may not listen any more; that is no reason to stop.
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "systemd could not be told");
    }
}
