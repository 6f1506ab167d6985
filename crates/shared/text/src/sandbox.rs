//! Compiles a grammar in a process with limits, to find out whether it can be compiled within them.
//!
//! ```text
//!   gateway, base-executor                    the same program with the argument `grammar-compiler`
//!   Sandbox::judge  -- vocabulary, once -->   Grammars::over
//!                   -- source ------------>   Grammars::compile at nice 19, with memory and CPU time limits
//!                   <- verdict ------------   dropped; a compilation beyond a limit ends the process
//! ```
//!
//! The library bounds most costs of a grammar, but not all: `multipleOf` alone can take minutes and
//! gigabytes. So a serving process compiles only grammars that this process has compiled before.
//! Compilation is deterministic, so the second one costs as much as the first.
//!
//! # Layout
//!
//! - `child`: the compiler process. `frame`: the messages on the pipes. [`Sandbox`], here: the parent's
//!   side.

mod child;
mod frame;

use std::{
    io,
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::frame::{Ready, Verdict};
pub use self::{
    child::{ChildError, serve},
    frame::FrameError,
};
use crate::grammar::Tokens;

/// Argument with which a program becomes the grammar compiler process.
pub const ARGUMENT: &str = "grammar-compiler";

/// Path of the running program, valid even if its file was replaced since.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// CPU time limit of one compilation, in milliseconds.
pub const CPU_MS: u64 = 500;

/// Memory limit of one compilation in bytes, in addition to the vocabulary.
pub const MEMORY_BYTES: u64 = 256 << 20;

/// Maximum number of processes per gateway or executor: two, so that one tenant's slow grammar leaves one
/// for other tenants.
pub const PROCESSES: usize = 2;

/// Maximum wait for a verdict. A process at the lowest priority may take long for little work on a busy
/// machine.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// Judges grammars in one process, which starts with the first grammar and again after each process that
/// was ended.
#[derive(Debug)]
pub struct Sandbox {
    program: PathBuf,
    tokens: Arc<Tokens>,
    process: Option<Process>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    /// Number of grammars that the process has judged.
    judged: u64,
}

/// Why a grammar is not compiled outside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// The grammar is invalid or unsupported.
    #[error("{0}")]
    Refused(String),
    /// The compilation exceeded a limit and was ended.
    #[error(
        "its compilation needs more than {CPU_MS} ms or {} MiB of memory; make it smaller, with shorter \
         repetitions and smaller multiples",
        MEMORY_BYTES >> 20
    )]
    TooMuch,
    /// No compiler process could give a verdict.
    #[error("it could not be compiled: {0}; send the request again")]
    Unavailable(String),
}

#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("the process that compiles grammars did not start: {0}")]
    Start(io::Error),
    #[error("the process that compiles grammars ended: {0}")]
    Ended(FrameError),
    /// The process did not answer within [`LONGEST_WAIT`].
    #[error("the process that compiles grammars did not answer within {} seconds", LONGEST_WAIT.as_secs())]
    Late,
}

impl Sandbox {
    /// Creates a sandbox for `tokens`. `program` becomes the compiler process with the argument [`ARGUMENT`].
    #[must_use]
    pub fn new(program: PathBuf, tokens: Arc<Tokens>) -> Self {
        Self { program, tokens, process: None }
    }

    /// Checks that `source` can be compiled within the limits. Blocks until the process has answered.
    ///
    /// # Errors
    /// If the grammar is refused, exceeds the limits, or no compiler process is available.
    pub fn judge(&mut self, source: &str) -> Result<(), SandboxError> {
        loop {
            let process = self.started().map_err(|lost| SandboxError::Unavailable(lost.to_string()))?;
            let is_fresh = process.judged == 0;
            let verdict = process.judge(source);
            if !matches!(verdict, Ok(Verdict::Good | Verdict::Refused(_))) {
                self.process = None;
            }
            return match verdict {
                Ok(Verdict::Good) => Ok(()),
                Ok(Verdict::Refused(why)) => Err(SandboxError::Refused(why)),
                Ok(Verdict::TooMuchTime) => Err(SandboxError::TooMuch),
                // A reused process may have had less memory left, and the verdict must not depend on that.
                Err(Lost::Ended(_)) if !is_fresh => continue,
                Err(Lost::Ended(_)) => Err(SandboxError::TooMuch),
                Err(lost) => Err(SandboxError::Unavailable(lost.to_string())),
            };
        }
    }

    fn started(&mut self) -> Result<&mut Process, Lost> {
        match &mut self.process {
            Some(process) => Ok(process),
            none => Ok(none.insert(Process::start(&self.program, &self.tokens)?)),
        }
    }
}

impl Process {
    /// Starts `program` and waits until it has received `tokens`.
    fn start(program: &Path, tokens: &Tokens) -> Result<Self, Lost> {
        let mut command = Command::new(program);
        // The environment may hold secrets, and the compiler process needs none of it.
        command.arg0("holobiont-grammar-compiler").arg(ARGUMENT).env_clear().current_dir("/");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(Lost::Start)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Lost::Start(io::Error::other("it has no pipes")));
        };
        let mut process = Self { child, input, output, judged: 0 };
        let ready = frame::write(&mut process.input, tokens).map_err(Lost::Ended);
        match ready.and_then(|()| process.answer::<Ready>()) {
            Ok(Ready) => Ok(process),
            // No grammar was compiled yet, so no grammar is to blame.
            Err(lost) => Err(Lost::Start(io::Error::other(lost.to_string()))),
        }
    }

    fn judge(&mut self, source: &str) -> Result<Verdict, Lost> {
        frame::write(&mut self.input, &source).map_err(Lost::Ended)?;
        let verdict = self.answer()?;
        self.judged += 1;
        Ok(verdict)
    }

    fn answer<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, Lost> {
        self.wait_for_output()?;
        frame::read(&mut self.output).map_err(Lost::Ended)?.ok_or(Lost::Ended(FrameError::Closed))
    }

    /// Waits until the process has written output or has ended.
    fn wait_for_output(&self) -> Result<(), Lost> {
        let until = Instant::now() + LONGEST_WAIT;
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
