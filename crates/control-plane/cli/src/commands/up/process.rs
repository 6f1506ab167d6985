//! One child process: started with a lifeline pipe, observed on stdout and its notify socket, stopped by
//! signal.

use std::{
    ffi::{OsStr, OsString},
    fmt, io,
    path::PathBuf,
    process::ExitStatus,
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use settings::{MAX_PROCESS_NAME_BYTES, variables::PREFIX};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::oneshot,
};

use super::{
    log::LogSink,
    sd_notify::{NotifyMessage, NotifyReader},
};

/// Longest wait for the rest of a dead process's stderr.
const LAST_WORDS: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessRole {
    /// Process that owns the base weights.
    Executor(Instance),
    /// Process that serves HTTP.
    Gateway,
    /// Process that trains adapters on request.
    Trainer,
    /// Process that computes adapters on one core.
    Worker(WorkerSpec),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Instance {
    /// Position among the executors.
    pub(crate) index: usize,
    /// Name padded with zeros; all zeros for a single executor.
    name: [u8; MAX_PROCESS_NAME_BYTES],
}

impl Instance {
    /// Creates the instance at `index`, with a name if there are several executors.
    pub(crate) fn new(index: usize, name: Option<&str>) -> Self {
        let mut filled = [0; MAX_PROCESS_NAME_BYTES];
        let given = name.unwrap_or_default().bytes();
        filled.iter_mut().zip(given).for_each(|(place, byte)| *place = byte);
        Self { index, name: filled }
    }

    /// Returns the executor's name, if there are several.
    pub(crate) fn name(&self) -> Option<&str> {
        let bytes = self.name.split(|byte| *byte == 0).next().unwrap_or_default();
        std::str::from_utf8(bytes).ok().filter(|name| !name.is_empty())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkerSpec {
    /// Position among the workers.
    pub(crate) index: usize,
    /// Core to which the worker is pinned.
    pub(crate) core: u32,
}

impl ProcessRole {
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Executor(_) => "base-executor",
            Self::Gateway => "gateway",
            Self::Trainer => "holobiont-trainer",
            Self::Worker(_) => "lora-worker",
        }
    }

    /// True if the deployment ends when this process cannot be kept alive.
    pub(crate) fn is_needed(self) -> bool {
        matches!(self, Self::Executor(_) | Self::Gateway)
    }
}

impl fmt::Display for ProcessRole {
    /// Formats the program's name, with executor name and worker core as in the names of their systemd
    /// units.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Executor(instance) => match instance.name() {
                Some(name) => f.pad(&format!("{}@{name}", self.program())),
                None => f.pad(self.program()),
            },
            Self::Gateway | Self::Trainer => f.pad(self.program()),
            Self::Worker(worker) => f.pad(&format!("{}@{}", self.program(), worker.core)),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandSpec {
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<OsString>,
    /// Socket on which the process sends status and heartbeats.
    pub(crate) notify_socket: PathBuf,
    /// Longest allowed time without a heartbeat after the first one.
    pub(crate) longest_silence: Duration,
}

impl CommandSpec {
    /// Replaces the value of the option `flag`, if present.
    pub(crate) fn set(&mut self, flag: &str, value: &str) {
        let place = self.arguments.iter().position(|argument| argument == flag);
        if let Some(argument) = place.and_then(|place| self.arguments.get_mut(place + 1)) {
            *argument = value.into();
        }
    }
}

#[derive(Debug)]
pub(crate) enum ChildEvent {
    /// Line on the process's stdout.
    Line(String),
    /// Status message, or a missing heartbeat.
    Notice(NotifyMessage),
    Exited(ProcessExit),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessExit {
    pub(crate) status: ExitStatus,
    /// Reason that the process gave on stderr.
    pub(crate) cause: Option<String>,
}

impl fmt::Display for ProcessExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Some(cause) => f.write_str(cause),
            None => write!(f, "it ended with {}", self.status),
        }
    }
}

#[derive(Debug)]
pub(crate) struct ManagedChild {
    child: Child,
    /// This pipe is never written: the child reads end-of-file when this process is gone for any reason,
    /// and drains.
    _lifeline: Option<ChildStdin>,
    notices: NotifyReader,
    stdout: Option<Lines<BufReader<ChildStdout>>>,
    /// Receives the reason for the end once all of stderr has been copied.
    said_all: Option<oneshot::Receiver<Option<String>>>,
}

impl ManagedChild {
    /// Starts the program with stderr going to `log`. The child has its own process group, so that Ctrl-C
    /// reaches only the supervisor, which chooses the order of stopping.
    pub(crate) fn start(recipe: &CommandSpec, log: &LogSink) -> io::Result<Self> {
        let (stderr, said_all) = log.pipe()?;
        let notices = NotifyReader::bind(&recipe.notify_socket, recipe.longest_silence)?;
        let mut command = Command::new(&recipe.program);
        // Settings come as arguments alone: a variable meant for `up` must not change a child's settings.
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_a_setting(name)) {
            command.env_remove(name);
        }
        let mut child = command
            .args(&recipe.arguments)
            .env("NOTIFY_SOCKET", &recipe.notify_socket)
            // The child's lines also go into a file, so they must not contain colour codes.
            .env("NO_COLOR", "1")
            // systemd's watchdog watches `up`; `up` is the watchdog of the child.
            .env("WATCHDOG_USEC", recipe.longest_silence.as_micros().to_string())
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let stdout = child.stdout.take().map(|pipe| BufReader::new(pipe).lines());
        Ok(Self { _lifeline: child.stdin.take(), child, notices, stdout, said_all: Some(said_all) })
    }

    /// Waits for the next event. Cancellation-safe: dropping the future loses no event.
    pub(crate) async fn next(&mut self) -> ChildEvent {
        loop {
            let line = async {
                match &mut self.stdout {
                    Some(lines) => lines.next_line().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // Lines that the child printed are reported before its exit.
                biased;
                line = line => match line {
                    Ok(Some(line)) => return ChildEvent::Line(line),
                    // Stdout is closed or not UTF-8, so no further line can be read.
                    Ok(None) | Err(_) => self.stdout = None,
                },
                notice = self.notices.next() => return ChildEvent::Notice(notice),
                status = self.child.wait() => match status {
                    Ok(status) => {
                        let cause = self.hear_last_words().await;
                        return ChildEvent::Exited(ProcessExit { status, cause });
                    }
                    // Waiting fails only for processes that are no children of this one.
                    Err(error) => unreachable!("waiting for a child failed: {error}"),
                },
            }
        }
    }

    /// Waits until the child's last lines are copied. A grandchild may keep the pipe open; then the wait
    /// times out.
    async fn hear_last_words(&mut self) -> Option<String> {
        let cause = tokio::time::timeout(LAST_WORDS, self.said_all.as_mut()?).await.ok()?.ok()?;
        self.said_all = None;
        cause
    }

    /// Returns the process id while the child runs.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Asks the child to drain and exit.
    pub(crate) fn terminate(&self) {
        if let Some(pid) = self.pid() {
            // The child may have exited just now, but its id stays reserved until it is reaped.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Kills the child and its process group.
    pub(crate) fn kill(&self) {
        if let Some(pid) = self.pid() {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    fn pid(&self) -> Option<Pid> {
        self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw)
    }
}

/// True for Holobiont's variables, except the one that arms failpoints in tests.
fn is_a_setting(variable: &OsStr) -> bool {
    variable.as_encoded_bytes().starts_with(PREFIX.as_bytes()) && variable != "HOLOBIONT_FAILPOINTS"
}
