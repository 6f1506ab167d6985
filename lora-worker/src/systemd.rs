//! Notifications to systemd: start, status, watchdog and exit.
//!
//! Without `NOTIFY_SOCKET` nothing is sent. A worker is ready when it is on its core and looks for an
//! executor, so systemd does not wait for the executor. The watchdog is fed only while the compute thread
//! loops (`signals`).

use sd_notify::NotifyState;

use crate::thread_status::ConsumerStatus;

pub(crate) fn ready() {
    notify_systemd(&[NotifyState::Ready, NotifyState::Status(&in_words(ConsumerStatus::Waiting))]);
}

pub(crate) fn status(seating: ConsumerStatus) {
    notify_systemd(&[NotifyState::Status(&in_words(seating))]);
}

pub(crate) fn alive() {
    notify_systemd(&[NotifyState::Watchdog]);
}

pub(crate) fn stopping() {
    notify_systemd(&[NotifyState::Stopping]);
}

fn in_words(seating: ConsumerStatus) -> String {
    match seating {
        ConsumerStatus::Waiting => "waiting for an executor".to_owned(),
        ConsumerStatus::Seated { adapters } => format!("ready, with {adapters} adapters"),
    }
}

fn notify_systemd(state: &[NotifyState<'_>]) {
    // systemd may have closed the socket; the worker continues.
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "cannot notify systemd");
    }
}
