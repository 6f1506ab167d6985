//! What systemd hears, where `up` is a unit of `Type=notify`.

use sd_notify::NotifyState;
use tokio::time::{Interval, interval};

/// What systemd's watchdog waits for.
#[derive(Debug)]
pub(crate) struct Watchdog(Option<Interval>);

impl Watchdog {
    /// Twice as often as the unit's `WatchdogSec=` asks for.
    pub(crate) fn new() -> Self {
        Self(sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()).map(|limit| interval(limit / 2)))
    }

    /// Returns when the next [`still_alive`] is due; never, without a watchdog.
    pub(crate) async fn due(&mut self) {
        match &mut self.0 {
            Some(interval) => {
                interval.tick().await;
            }
            None => std::future::pending().await,
        }
    }
}

/// Requests are welcome.
pub(crate) fn ready(url: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(&format!("serving at {url}"))]);
}

/// What is going on, for `systemctl status`.
pub(crate) fn status(text: &str) {
    notify(&[NotifyState::Status(text)]);
}

/// A stop has begun.
pub(crate) fn stopping() {
    notify(&[NotifyState::Stopping]);
}

/// The event loop turns.
pub(crate) fn still_alive() {
    notify(&[NotifyState::Watchdog]);
}

fn notify(states: &[NotifyState]) {
    // systemd that does not listen is no reason to stop serving.
    let _ = sd_notify::notify(states);
}
