//! Errors of `up`: why a deployment did not start or did not end in order, and what to do.

use std::{io, net::SocketAddr, path::PathBuf, time::Duration};

use super::{
    process::{ProcessExit, ProcessRole},
    restart,
};
use crate::{
    commands::doctor::host_ledger::LedgerError,
    deployment::config::DeploymentConfigError,
    exit::{Exit, Explain},
    models::FindError,
    terminal::quoted,
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum UpError {
    #[error(transparent)]
    Config(#[from] DeploymentConfigError),
    #[error(transparent)]
    Model(#[from] FindError),
    #[error("the adapter `{name}` is not in {path}: the file adapter_config.json is missing")]
    NoAdapter {
        /// Configured name of the adapter.
        name: String,
        /// Directory searched for the adapter.
        path: PathBuf,
    },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error("the bases `{}` and `{}` have the same model {model}", names[0], names[1])]
    SameModel {
        /// Names of both bases.
        names: [String; 2],
        model: PathBuf,
    },
    #[error("the base `{base}` names the core {core}, and this machine has the cores {allowed}")]
    NoCore {
        base: String,
        core: u32,
        /// Cores on which this process may run.
        allowed: String,
    },
    #[error("the program `{}` is neither beside `holobiont` nor on PATH", role.program())]
    NoProgram { role: ProcessRole },
    #[error("another `holobiont up`{} already uses the state directory {path}", pid.as_ref().map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    StateTaken {
        path: PathBuf,
        /// Process id of the other `up`, if the lock file holds it.
        pid: Option<u32>,
    },
    #[error("cannot use the state directory {path}")]
    State {
        /// Path whose use failed.
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "the state directory's path is too long: the socket path {socket} has {bytes} bytes, and the \
         maximum is 107"
    )]
    PathTooLong {
        socket: PathBuf,
        /// Length of the path in bytes.
        bytes: usize,
    },
    #[error("port {} of {} is taken by another process", listen.port(), listen.ip())]
    PortTaken { listen: SocketAddr },
    #[error("cannot listen on {listen}")]
    Listen { listen: SocketAddr, source: io::Error },
    #[error("cannot start {role}")]
    Spawn { role: ProcessRole, source: io::Error },
    #[error("cannot write the log in {path}")]
    Log { path: PathBuf, source: io::Error },
    #[error("cannot start in the background")]
    Background(#[source] io::Error),
    /// The background process failed and has printed the reason.
    #[error("the deployment did not start")]
    FailedBehind { exit: Exit },
    #[error("{role} did not start: {ending}")]
    NotReady { role: ProcessRole, ending: ProcessExit },
    #[error("{role} crashed {deaths} times within {} s; the last time: {ending}", restart::WINDOW.as_secs())]
    KeepsDying {
        role: ProcessRole,
        /// Number of deaths within the window.
        deaths: usize,
        /// Exit of the last death.
        ending: ProcessExit,
    },
    #[error("the processes did not stop within {} ms and were killed", waited.as_millis())]
    GraceOver { waited: Duration },
    /// The user pressed Ctrl-C a second time.
    #[error("stopped without waiting for running requests; some answers are incomplete")]
    Interrupted,
    #[error("cannot set up the supervisor")]
    Runtime(#[source] io::Error),
}

impl Explain for UpError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Model(error) => error.exit(),
            Self::Ledger(error) => error.exit(),
            Self::SameModel { .. } | Self::NoCore { .. } => Exit::Usage,
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
            Self::Ledger(error) => error.next(),
            Self::SameModel { names, .. } => {
                Some(format!("remove the base `{}`, or load its adapters into `{}`", names[1], names[0]))
            }
            Self::NoCore { base, .. } => Some(format!("correct the cores of the base `{base}`")),
            Self::NoAdapter { name, .. } => Some(format!("--adapter {name}=DIRECTORY_OF_A_PEFT_ADAPTER")),
            Self::NoProgram { role: ProcessRole::Worker(_) } => {
                Some("cargo build --release --bin lora-worker, or use --workers 0".into())
            }
            Self::NoProgram { role } => Some(format!("cargo build --release --bin {role}")),
            Self::StateTaken { path, .. } => {
                let stop = format!("holobiont down --state {}", quoted(&path.to_string_lossy()));
                Some(format!("{stop} stops the other one; or choose another --state DIR"))
            }
            Self::PathTooLong { .. } => Some("choose a --state with a shorter path".into()),
            Self::PortTaken { listen } => Some(format!("--listen {}:0 for any free port", listen.ip())),
            Self::KeepsDying { .. } => Some("holobiont logs shows why".into()),
            _ => None,
        }
    }

    fn is_said(&self) -> bool {
        matches!(self, Self::FailedBehind { .. })
    }
}
