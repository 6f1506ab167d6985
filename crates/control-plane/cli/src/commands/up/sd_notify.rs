//! What a child says of itself, as it would to systemd (`sd_notify`): how far it is, and that it lives.

use std::{fs, io, path::Path, time::Duration};

use tokio::{
    net::UnixDatagram,
    time::{Interval, MissedTickBehavior, interval},
};

/// Longest message of a process; what is longer is cut off.
const MAX_MESSAGE_BYTES: usize = 4096;

/// A silence is counted in so many parts of the longest one.
const PARTS: u32 = 8;

/// What was heard, or not heard.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotifyMessage {
    /// How far it is, in words.
    Status(String),
    /// Nothing, for too long.
    Silence,
}

/// One life of a child, by what it says.
#[derive(Debug)]
pub(crate) struct NotifyReader {
    socket: UnixDatagram,
    ticks: Interval,
    silence: HeartbeatSilence,
}

/// How long a child has been silent, in ticks of our own.
///
/// It is watched from its first heartbeat on: what loads a model says nothing for as long as that takes. While we do not
/// run ourselves, because somebody stopped us or the machine sleeps, there are no ticks, and so nobody is found silent
/// who was not given time to speak.
#[derive(Debug, Default)]
struct HeartbeatSilence(Option<u32>);

impl HeartbeatSilence {
    fn broken(&mut self) {
        self.0 = Some(0);
    }

    /// True if it has lasted too long; it is said once. The first tick may come right after a word.
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
    /// Listens at `path`, in a directory that only this user can enter; what an earlier child said there is gone.
    pub(crate) fn bind(path: &Path, longest_silence: Duration) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut ticks = interval((longest_silence / PARTS).max(Duration::from_millis(1)));
        // After a time without us there is one tick, not all that were missed.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self { socket: UnixDatagram::bind(path)?, ticks, silence: HeartbeatSilence::default() })
    }

    /// Waits for the next notice. May be dropped and called again without losing anything.
    pub(crate) async fn next(&mut self) -> NotifyMessage {
        let mut message = [0; MAX_MESSAGE_BYTES];
        loop {
            tokio::select! {
                // What was said while we did not run comes before the silence that followed.
                biased;
                received = self.socket.recv(&mut message) => match received {
                    Ok(length) => {
                        if let Some(status) = self.hear(&String::from_utf8_lossy(&message[..length])) {
                            return NotifyMessage::Status(status);
                        }
                    }
                    // Nothing can be heard any more; serving goes on.
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

    /// Notices of a child that lives, and how it speaks.
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
        // This is us being stopped: many limits go by, and one tick.
        std::thread::sleep(Duration::from_millis(800));
        let ticks = notices.silence.0.unwrap();
        tokio::select! { biased; _ = notices.next() => panic!("it had no time to speak"), () = async {} => {} }
        assert!(notices.silence.0.unwrap() <= ticks + 1);
    }
}
