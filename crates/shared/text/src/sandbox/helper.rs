//! The parent's side of a helper process.

use std::{
    io,
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    frame::{self, FrameError, Ready, Reply},
    work::Work,
};

/// Maximum wait for a reply. A process of low priority may take long for little work on a busy machine.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// A helper process, which starts with the first question, and again after each process that was ended.
#[derive(Debug)]
pub(super) struct Helper<W: Work> {
    program: PathBuf,
    setup: Arc<W::Setup>,
    process: Option<Process>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    /// Number of questions that the process has answered.
    answered: u64,
}

/// Why a helper process gave no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HelperError {
    /// The work exceeded a limit of time or memory.
    TooMuch,
    /// The work panicked in the process.
    Failed,
    /// No process could be asked.
    Unavailable(String),
}

#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("the helper process did not start: {0}")]
    Start(io::Error),
    #[error("the helper process ended: {0}")]
    Ended(FrameError),
    /// The process did not answer within [`MAX_WAIT`].
    #[error("the helper process did not answer within {} seconds", MAX_WAIT.as_secs())]
    Late,
}

impl<W: Work> Helper<W> {
    /// Creates a helper that runs `program` with the argument of `W`.
    pub(super) fn new(program: PathBuf, setup: Arc<W::Setup>) -> Self {
        Self { program, setup, process: None }
    }

    /// Returns the answer to `question`, which the helper process deserializes as `W::Question`. Blocks until
    /// the process has replied.
    pub(super) fn ask(&mut self, question: &impl Serialize) -> Result<W::Answer, HelperError> {
        loop {
            let process = self.started().map_err(|lost| HelperError::Unavailable(lost.to_string()))?;
            let is_fresh = process.answered == 0;
            let reply = process.ask(question);
            if !matches!(reply, Ok(Reply::Answer(_) | Reply::Failed)) {
                self.process = None;
            }
            return match reply {
                Ok(Reply::Answer(answer)) => Ok(answer),
                Ok(Reply::Failed) => Err(HelperError::Failed),
                Ok(Reply::TooMuchTime) => Err(HelperError::TooMuch),
                // A reused process may have had less memory left, and the answer must not depend on that.
                Err(Lost::Ended(_)) if !is_fresh => continue,
                Err(Lost::Ended(_)) => Err(HelperError::TooMuch),
                Err(lost) => Err(HelperError::Unavailable(lost.to_string())),
            };
        }
    }

    fn started(&mut self) -> Result<&mut Process, Lost> {
        match &mut self.process {
            Some(process) => Ok(process),
            none => Ok(none.insert(Process::start::<W>(&self.program, &self.setup)?)),
        }
    }
}

impl Process {
    /// Starts `program` and waits until it has received `setup`.
    fn start<W: Work>(program: &Path, setup: &W::Setup) -> Result<Self, Lost> {
        let mut command = Command::new(program);
        // The environment may hold secrets, and a helper process needs none of it.
        command.arg0(format!("holobiont-{}", W::ARGUMENT)).arg(W::ARGUMENT).env_clear().current_dir("/");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(Lost::Start)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Lost::Start(io::Error::other("it has no pipes")));
        };
        let mut process = Self { child, input, output, answered: 0 };
        let ready = frame::write(&mut process.input, setup).map_err(Lost::Ended);
        match ready.and_then(|()| process.read::<Ready>()) {
            Ok(Ready) => Ok(process),
            // No question was asked yet, so no question is to blame.
            Err(lost) => Err(Lost::Start(io::Error::other(lost.to_string()))),
        }
    }

    fn ask<A: DeserializeOwned>(&mut self, question: &impl Serialize) -> Result<Reply<A>, Lost> {
        frame::write(&mut self.input, question).map_err(Lost::Ended)?;
        let reply = self.read()?;
        self.answered += 1;
        Ok(reply)
    }

    fn read<T: DeserializeOwned>(&mut self) -> Result<T, Lost> {
        self.wait_for_output()?;
        frame::read(&mut self.output).map_err(Lost::Ended)?.ok_or(Lost::Ended(FrameError::Closed))
    }

    /// Waits until the process has written output or has ended.
    fn wait_for_output(&self) -> Result<(), Lost> {
        let until = Instant::now() + MAX_WAIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(|_| Lost::Late)?;
            match poll(&mut [PollFd::from_borrowed_fd(self.output.as_fd(), PollFlags::IN)], Some(&left)) {
                Ok(0) => return Err(Lost::Late),
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Lost::Ended(FrameError::Pipe(error.into()))),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
