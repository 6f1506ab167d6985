//! systemd's protocol for services, in both directions: the executor tells `up` how far it is, as it tells systemd where it
//! is a unit of its own, and `up` tells systemd, where it is a unit of `Type=notify`.

use std::{io, path::Path};

use sd_notify::NotifyState;
use tokio::{
    net::UnixDatagram,
    time::{Interval, interval},
};

/// Longest message of a process; what is longer is cut off.
const MAX_MESSAGE_BYTES: usize = 4096;

/// Where a process says how far it is.
#[derive(Debug)]
pub(crate) struct Notices(Option<UnixDatagram>);

impl Notices {
    /// Listens at `path`, in a directory that only this user can enter; without one, to nobody.
    pub(crate) fn bind(path: Option<&Path>) -> io::Result<Self> {
        path.map(UnixDatagram::bind).transpose().map(Self)
    }

    /// The next status in words. What else a process says is its `ready` line's business.
    pub(crate) async fn next(&self) -> String {
        let Some(socket) = &self.0 else {
            return std::future::pending().await;
        };
        let mut message = [0; MAX_MESSAGE_BYTES];
        loop {
            match socket.recv(&mut message).await {
                Ok(length) => {
                    if let Some(status) = status_in(&message[..length]) {
                        return status;
                    }
                }
                // Nothing can be heard any more; serving goes on.
                Err(_) => std::future::pending().await,
            }
        }
    }
}

fn status_in(message: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(message);
    text.lines().find_map(|line| line.strip_prefix("STATUS=")).map(str::to_owned)
}

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
    say(&[NotifyState::Ready, NotifyState::Status(&format!("serving at {url}"))]);
}

/// What is going on, for `systemctl status`.
pub(crate) fn status(text: &str) {
    say(&[NotifyState::Status(text)]);
}

/// A stop has begun.
pub(crate) fn stopping() {
    say(&[NotifyState::Stopping]);
}

/// The event loop turns.
pub(crate) fn still_alive() {
    say(&[NotifyState::Watchdog]);
}

fn say(states: &[NotifyState]) {
    // systemd that does not listen is no reason to stop serving.
    let _ = sd_notify::notify(states);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_says_how_far_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify.sock");
        let notices = Notices::bind(Some(&path)).unwrap();
        let process = std::os::unix::net::UnixDatagram::unbound().unwrap();
        for message in ["WATCHDOG=1", "READY=1\nSTATUS=loading: reading weights, 43 %\n"] {
            process.send_to(message.as_bytes(), &path).unwrap();
        }
        assert_eq!(notices.next().await, "loading: reading weights, 43 %");
    }
}
