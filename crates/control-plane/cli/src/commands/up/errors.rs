//! Why a deployment did not start, or did not end in order, and what to do about it.

use std::{io, net::SocketAddr, path::PathBuf, time::Duration};

use super::{
    process::{ProcessExit, ProcessRole},
    restart,
};
use crate::{
    deployment::config::DeploymentConfigError,
    exit::{Exit, Explain},
    models::FindError,
    terminal::quoted,
};

/// Why a deployment did not start, or ended otherwise than by being asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] DeploymentConfigError),
    /// The model is not there.
    #[error(transparent)]
    Model(#[from] FindError),
    /// An adapter's directory holds no adapter.
    #[error("the adapter `{name}` is not in {path}: no adapter_config.json there")]
    NoAdapter {
        /// What it would be called.
        name: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// One of the programs is not installed.
    #[error("the program `{}` is neither beside `holobiont` nor on PATH", role.program())]
    NoProgram {
        /// The process, by what it does.
        role: ProcessRole,
    },
    /// Another `up` uses the state directory.
    #[error("another `holobiont up`{} already uses the state directory {path}", pid.as_ref().map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    StateTaken {
        /// The directory.
        path: PathBuf,
        /// Its process, if it said so.
        pid: Option<u32>,
    },
    /// The state directory cannot be used.
    #[error("cannot use the state directory {path}")]
    State {
        /// The path that made trouble.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket's path does not fit into a socket address.
    #[error(
        "the state directory's path is too long: the socket {socket} would have {bytes} bytes, 107 are possible"
    )]
    PathTooLong {
        /// The socket's path.
        socket: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// Somebody listens there already.
    #[error("port {} of {} is taken by another process", listen.port(), listen.ip())]
    PortTaken {
        /// The address.
        listen: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {listen}")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A process could not be started at all.
    #[error("cannot start {role}")]
    Spawn {
        /// The process, by what it does.
        role: ProcessRole,
        /// Why.
        source: io::Error,
    },
    /// The log cannot be written.
    #[error("cannot keep a log in {path}")]
    Log {
        /// Its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No process can be started in the background.
    #[error("cannot start in the background")]
    Background(#[source] io::Error),
    /// The process in the background has failed and said why.
    #[error("the deployment did not start")]
    FailedBehind {
        /// How it ended.
        exit: Exit,
    },
    /// A process stopped before it was ready.
    #[error("{role} did not start: {ending}")]
    NotReady {
        /// The process, by what it does.
        role: ProcessRole,
        /// How it ended.
        ending: ProcessExit,
    },
    /// A process dies again and again.
    #[error("{role} died {deaths} times within {} s, the last time so: {ending}", restart::WINDOW.as_secs())]
    KeepsDying {
        /// The process, by what it does.
        role: ProcessRole,
        /// How often.
        deaths: usize,
        /// How it ended last.
        ending: ProcessExit,
    },
    /// The processes did not stop in time and were killed.
    #[error("the processes did not stop within {} ms and were killed", waited.as_millis())]
    GraceOver {
        /// How long they had.
        waited: Duration,
    },
    /// A second Ctrl-C.
    #[error("stopped at once, without draining: some answers were cut off")]
    Interrupted,
    /// Signals cannot be received, or no event loop can be made.
    #[error("cannot set up the supervisor")]
    Runtime(#[source] io::Error),
}

impl Explain for UpError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Model(error) => error.exit(),
            Self::NoAdapter { .. } | Self::NoProgram { .. } => Exit::NotFound,
            Self::StateTaken { .. } | Self::PortTaken { .. } => Exit::Conflict,
            Self::PathTooLong { .. } => Exit::Usage,
            Self::NotReady { ending, .. } => Exit::of_code(ending.status.code()),
            Self::FailedBehind { exit } => *exit,
            Self::Listen { source, .. } | Self::State { source, .. } | Self::Log { source, .. }
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                Exit::Refused
            }
            _ => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.next(),
            Self::Model(error) => error.next(),
            Self::NoAdapter { name, .. } => Some(format!("--adapter {name}=DIRECTORY_OF_A_PEFT_ADAPTER")),
            Self::NoProgram { role: ProcessRole::Worker(_) } => {
                Some("cargo build --release --bin lora-worker, or go without: --workers 0".into())
            }
            Self::NoProgram { role } => Some(format!("cargo build --release --bin {role}")),
            Self::StateTaken { path, .. } => {
                let stop = format!("holobiont down --state {}", quoted(&path.to_string_lossy()));
                Some(format!("{stop} stops the other one; or give this one its own --state DIR"))
            }
            Self::PathTooLong { .. } => Some("--state with a shorter path".into()),
            Self::PortTaken { listen } => Some(format!("--listen {}:0 for any free port", listen.ip())),
            Self::KeepsDying { .. } => Some("holobiont logs shows what it said".into()),
            _ => None,
        }
    }

    fn is_said(&self) -> bool {
        matches!(self, Self::FailedBehind { .. })
    }
}
