//! Receives status messages and heartbeats of a child, in systemd's `sd_notify` protocol.

use std::{fs, io, path::Path, time::Duration};

use tokio::{
    net::UnixDatagram,
    time::{Interval, MissedTickBehavior, interval},
};

/// Longest message in bytes; longer messages are truncated.
const MAX_MESSAGE_BYTES: usize = 4096;

/// Number of ticks into which the longest allowed silence is divided.
const PARTS: u32 = 8;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotifyMessage {
    /// Status text of the child.
    Status(String),
    /// No heartbeat came for too long.
    Silence,
}

/// Receiver of one child's messages, for one run of the child.
#[derive(Debug)]
pub(crate) struct NotifyReader {
    socket: UnixDatagram,
    ticks: Interval,
    silence: HeartbeatSilence,
}

/// Number of our own ticks since the child's last heartbeat.
///
/// The child is watched from its first heartbeat on, because loading a model sends none. While this process
/// is stopped or the machine sleeps, there are no ticks, so a child without time to run is not found
/// silent.
#[derive(Debug, Default)]
struct HeartbeatSilence(Option<u32>);

impl HeartbeatSilence {
    fn broken(&mut self) {
        self.0 = Some(0);
    }

    /// Counts a tick; true, once, if the silence has lasted too long. The first tick may directly follow a
    /// message.
    fn tick(&mut self) -> bool {
        self.0 = self.0.map(|ticks| ticks + 1);
        let is_too_long = self.0 > Some(PARTS);
        if is_too_long {
            self.0 = None;
        }
        is_too_long
    }
}

impl NotifyReader {
    /// Binds the socket at `path`, in a directory that only this user can enter, and discards an earlier
    /// child's socket.
    pub(crate) fn bind(path: &Path, longest_silence: Duration) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut ticks = interval((longest_silence / PARTS).max(Duration::from_millis(1)));
        // After a pause of this process there is one tick, not all missed ones.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self { socket: UnixDatagram::bind(path)?, ticks, silence: HeartbeatSilence::default() })
    }

    /// Waits for the next message. Cancellation-safe: dropping the future loses no message.
    pub(crate) async fn next(&mut self) -> NotifyMessage {
        let mut message = [0; MAX_MESSAGE_BYTES];
        loop {
            tokio::select! {
                // Messages received during a pause are read before the silence is judged.
                biased;
                received = self.socket.recv(&mut message) => match received {
                    Ok(length) => {
                        if let Some(status) = self.hear(&String::from_utf8_lossy(&message[..length])) {
                            return NotifyMessage::Status(status);
                        }
                    }
                    // The socket failed, so no message can be received; serving continues.
                    Err(_) => std::future::pending().await,
                },
                _ = self.ticks.tick() => {
                    if self.silence.tick() {
                        return NotifyMessage::Silence;
                    }
                }
            }
        }
    }

    fn hear(&mut self, message: &str) -> Option<String> {
        if message.lines().any(|line| line == "WATCHDOG=1") {
            self.silence.broken();
        }
        message.lines().find_map(|line| line.strip_prefix("STATUS=")).map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram as Socket;

    use super::*;

    /// Returns a reader and a function that sends messages to it as the child.
    fn notices(longest_silence: Duration) -> (tempfile::TempDir, NotifyReader, impl Fn(&str)) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify.sock");
        let notices = NotifyReader::bind(&path, longest_silence).unwrap();
        let child = Socket::unbound().unwrap();
        let say = move |message: &str| assert!(child.send_to(message.as_bytes(), &path).is_ok());
        (directory, notices, say)
    }

    #[tokio::test]
    async fn a_process_says_how_far_it_is_and_its_silence_after_a_sign_of_life_is_noticed() {
        let (_directory, mut notices, say) = notices(Duration::from_millis(80));
        say("READY=1\nSTATUS=loading: reading weights, 43 %\n");
        say("WATCHDOG=1");
        assert_eq!(notices.next().await, NotifyMessage::Status("loading: reading weights, 43 %".into()));
        assert_eq!(notices.next().await, NotifyMessage::Silence);
    }

    #[test]
    fn who_never_said_that_it_lives_is_not_found_silent_and_who_says_so_again_is_not_either() {
        let mut silence = HeartbeatSilence::default();
        assert!((0..100).all(|_| !silence.tick()), "it may be loading");
        for _ in 0..5 {
            silence.broken();
            assert!((0..PARTS).all(|_| !silence.tick()));
        }
        assert!(silence.tick() && !silence.tick(), "once");
    }

    #[tokio::test]
    async fn time_in_which_nobody_listened_is_nobodys_silence() {
        let (_directory, mut notices, say) = notices(Duration::from_millis(80));
        say("WATCHDOG=1");
        assert!(tokio::time::timeout(Duration::from_millis(5), notices.next()).await.is_err());
        // The sleep stands for a pause of this process: many limits pass, but one tick.
        std::thread::sleep(Duration::from_millis(800));
        let ticks = notices.silence.0.unwrap();
        tokio::select! { biased; _ = notices.next() => panic!("it had no time to speak"), () = async {} => {} }
        assert!(notices.silence.0.unwrap() <= ticks + 1);
    }
}
