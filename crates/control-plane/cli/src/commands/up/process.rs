//! One child process: started with a pipe that tells it when we are gone, heard on its stdout, stopped by signal.

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

/// How long the rest of a dead process's stderr is waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Which process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessRole {
    /// Owns the weights.
    Executor(Instance),
    /// Speaks HTTP.
    Gateway,
    /// Trains adapters for whoever asks.
    Trainer,
    /// Computes adapters on one core.
    Worker(WorkerSpec),
}

/// Which executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Instance {
    /// Its place among the executors.
    pub(crate) index: usize,
    /// Its name, filled up with zeros; of a single one nothing else.
    name: [u8; MAX_PROCESS_NAME_BYTES],
}

impl Instance {
    /// The one at `index`, which has a name if there are several.
    pub(crate) fn new(index: usize, name: Option<&str>) -> Self {
        let mut filled = [0; MAX_PROCESS_NAME_BYTES];
        let given = name.unwrap_or_default().bytes();
        filled.iter_mut().zip(given).for_each(|(place, byte)| *place = byte);
        Self { index, name: filled }
    }

    /// What it is called, if there are several.
    pub(crate) fn name(&self) -> Option<&str> {
        let bytes = self.name.split(|byte| *byte == 0).next().unwrap_or_default();
        std::str::from_utf8(bytes).ok().filter(|name| !name.is_empty())
    }
}

/// Which worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkerSpec {
    /// Its place among the workers.
    pub(crate) index: usize,
    /// The core it is pinned to.
    pub(crate) core: u32,
}

impl ProcessRole {
    /// The program's name.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Executor(_) => "base-executor",
            Self::Gateway => "gateway",
            Self::Trainer => "holobiont-trainer",
            Self::Worker(_) => "lora-worker",
        }
    }

    /// True if the deployment ends when this one cannot be kept alive.
    pub(crate) fn is_needed(self) -> bool {
        matches!(self, Self::Executor(_) | Self::Gateway)
    }
}

impl fmt::Display for ProcessRole {
    /// The program's name, with an executor's name and a worker's core as in the names of their systemd units.
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

/// How a process is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandSpec {
    /// The program.
    pub(crate) program: PathBuf,
    /// Its arguments.
    pub(crate) arguments: Vec<OsString>,
    /// Where it says how far it is, and that it lives.
    pub(crate) notify_socket: PathBuf,
    /// How long it may be silent once it has said so.
    pub(crate) longest_silence: Duration,
}

impl CommandSpec {
    /// Gives the option `flag`, if it is there, another value.
    pub(crate) fn set(&mut self, flag: &str, value: &str) {
        let place = self.arguments.iter().position(|argument| argument == flag);
        if let Some(argument) = place.and_then(|place| self.arguments.get_mut(place + 1)) {
            *argument = value.into();
        }
    }
}

/// What a process did.
#[derive(Debug)]
pub(crate) enum ChildEvent {
    /// It printed a line on stdout.
    Line(String),
    /// It said something of itself, or nothing for too long.
    Notice(NotifyMessage),
    /// It ended.
    Exited(ProcessExit),
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessExit {
    /// As the system says.
    pub(crate) status: ExitStatus,
    /// As it said itself.
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

/// A running child process.
#[derive(Debug)]
pub(crate) struct ManagedChild {
    child: Child,
    /// Nothing is ever written: the child reads end-of-file when this process is gone, however it went, and drains.
    _lifeline: Option<ChildStdin>,
    notices: NotifyReader,
    stdout: Option<Lines<BufReader<ChildStdout>>>,
    /// Hears when everything on its stderr has been passed on.
    said_all: Option<oneshot::Receiver<Option<String>>>,
}

impl ManagedChild {
    /// Starts the program. Its stderr goes to `log`; it has its own process group, so that a Ctrl-C reaches us alone
    /// and the order of stopping is ours to choose.
    pub(crate) fn start(recipe: &CommandSpec, log: &LogSink) -> io::Result<Self> {
        let (stderr, said_all) = log.pipe()?;
        let notices = NotifyReader::bind(&recipe.notify_socket, recipe.longest_silence)?;
        let mut command = Command::new(&recipe.program);
        // Settings come as arguments alone: a variable meant for `up` must not mean something else one level down.
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_a_setting(name)) {
            command.env_remove(name);
        }
        let mut child = command
            .args(&recipe.arguments)
            .env("NOTIFY_SOCKET", &recipe.notify_socket)
            // Its lines go into a file too.
            .env("NO_COLOR", "1")
            // The watchdog that systemd may hold over us is ours to feed; the child's is us.
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

    /// Waits for the next thing it does. May be dropped and called again without losing anything.
    pub(crate) async fn next(&mut self) -> ChildEvent {
        loop {
            let line = async {
                match &mut self.stdout {
                    Some(lines) => lines.next_line().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // What it said comes before how it ended.
                biased;
                line = line => match line {
                    Ok(Some(line)) => return ChildEvent::Line(line),
                    // Closed, or not text: nothing more to hear.
                    Ok(None) | Err(_) => self.stdout = None,
                },
                notice = self.notices.next() => return ChildEvent::Notice(notice),
                status = self.child.wait() => match status {
                    Ok(status) => {
                        let cause = self.hear_last_words().await;
                        return ChildEvent::Exited(ProcessExit { status, cause });
                    }
                    // Only a child that is not ours cannot be waited for, and this one is.
                    Err(error) => unreachable!("waiting for a child failed: {error}"),
                },
            }
        }
    }

    /// Its last words come before ours about its end. Something it started may keep the pipe open: then not.
    async fn hear_last_words(&mut self) -> Option<String> {
        let cause = tokio::time::timeout(LAST_WORDS, self.said_all.as_mut()?).await.ok()?.ok()?;
        self.said_all = None;
        cause
    }

    /// Its process id, while it has one.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Asks it to drain and exit.
    pub(crate) fn terminate(&self) {
        if let Some(pid) = self.pid() {
            // It may have exited just now; it is not reaped yet, so the id is still its own.
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// Kills it and whatever it started.
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
