//! The trainer's side of its client: events on stdout, replies on stdin, and the signals that stop a job.

use std::{
    io::{self, BufRead as _, Read as _},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use control_protocol::training::{
    TrainingEvent,
    rollout::{MAX_REPLY_BYTES, RolloutReply, RolloutRequest},
};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::{error::TunerError, event_output::emit};
use crate::job::JobListener;

/// Interval at which a job that waits for a reply looks for a signal.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Use of stdin by a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StdinUse {
    /// Stdin is not read.
    Nothing,
    /// The end of stdin means that the client is gone, and stops the job.
    EndOfClient,
    /// Stdin holds the replies to requests; its end stops the job.
    Replies,
}

/// Events on stdout, replies on stdin, and the signal that stops the job.
pub(super) struct JobConsole {
    signal: Arc<AtomicUsize>,
    replies: Receiver<io::Result<RolloutReply>>,
}

impl JobConsole {
    pub(super) fn new(stdin: StdinUse) -> Result<Self, TunerError> {
        let signal = Arc::new(AtomicUsize::new(0));
        let (sender, replies) = channel();
        if stdin != StdinUse::Nothing {
            let signal = Arc::clone(&signal);
            thread::spawn(move || {
                match stdin {
                    StdinUse::Replies => read_replies(&sender),
                    // The bytes have no meaning, and a read error counts as the end of input.
                    _ => drop(io::copy(&mut io::stdin().lock(), &mut io::sink())),
                }
                signal.store(usize::try_from(SIGTERM).unwrap_or_default(), Ordering::Relaxed);
            });
        }
        for number in [SIGINT, SIGTERM] {
            let value = usize::try_from(number).unwrap_or_default();
            signal_hook::flag::register_usize(number, Arc::clone(&signal), value)
                .map_err(|source| TunerError::System { what: "cannot receive signals", source })?;
        }
        Ok(Self { signal, replies })
    }

    /// Returns the signal that stops the job; 0 if none has come.
    pub(super) fn signal(&self) -> u8 {
        u8::try_from(self.signal.load(Ordering::Relaxed)).unwrap_or_default()
    }
}

/// Sends the replies on stdin, one for each line, until stdin ends.
fn read_replies(replies: &Sender<io::Result<RolloutReply>>) {
    let mut stdin = io::stdin().lock();
    loop {
        let mut line = Vec::new();
        let read = (&mut stdin).take(MAX_REPLY_BYTES).read_until(b'\n', &mut line);
        let reply = match read {
            Ok(0) => return,
            Ok(_) => serde_json::from_slice(&line).map_err(io::Error::from),
            Err(error) => Err(error),
        };
        let has_failed = reply.is_err();
        if replies.send(reply).is_err() || has_failed {
            return;
        }
    }
}

impl JobListener for JobConsole {
    fn hear(&mut self, event: &TrainingEvent) -> io::Result<()> {
        emit(event)
    }

    fn wants_stop(&self) -> bool {
        self.signal() != 0
    }

    fn draw(&mut self, request: RolloutRequest) -> io::Result<Option<RolloutReply>> {
        emit(&TrainingEvent::Rollouts(request))?;
        loop {
            match self.replies.recv_timeout(SIGNAL_INTERVAL) {
                Ok(reply) => return reply.map(Some),
                Err(RecvTimeoutError::Timeout) if !self.wants_stop() => {}
                Err(_) => return Ok(None),
            }
        }
    }
}
