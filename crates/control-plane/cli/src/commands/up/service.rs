//! Notifications to systemd, if `up` is a unit of `Type=notify`.

use sd_notify::NotifyState;
use tokio::time::{Interval, interval};

/// Timer for the heartbeats that systemd's watchdog expects.
#[derive(Debug)]
pub(crate) struct Watchdog(Option<Interval>);

impl Watchdog {
    /// Creates a timer of half the unit's `WatchdogSec=`.
    pub(crate) fn new() -> Self {
        Self(sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()).map(|limit| interval(limit / 2)))
    }

    /// Returns when the next [`still_alive`] is due; never without a watchdog.
    pub(crate) async fn due(&mut self) {
        match &mut self.0 {
            Some(interval) => {
                interval.tick().await;
            }
            None => std::future::pending().await,
        }
    }
}

/// Reports that the deployment serves at `url`.
pub(crate) fn ready(url: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(&format!("serving at {url}"))]);
}

/// Reports a status text for `systemctl status`.
pub(crate) fn status(text: &str) {
    notify(&[NotifyState::Status(text)]);
}

/// Reports that a stop has begun.
pub(crate) fn stopping() {
    notify(&[NotifyState::Stopping]);
}

/// Reports that the event loop runs.
pub(crate) fn still_alive() {
    notify(&[NotifyState::Watchdog]);
}

fn notify(states: &[NotifyState]) {
    // A systemd that does not listen is no reason to stop serving.
    let _ = sd_notify::notify(states);
}
