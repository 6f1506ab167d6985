//! `holobiont up`: starts a deployment's processes, keeps them alive, stops them in order.
//!
//! # Layout
//!
//! - [`detach`]: the same in the background
//! - [`log`]: what all processes say, kept in a file of bounded size
//! - [`plan`]: a configuration turned into checked command lines
//! - [`state_dir`]: the state directory's lock and this start's private run directory
//! - [`process`]: one child process; [`managed`]: the same over its lives
//! - [`restart`]: how often and how soon a dead process is started again
//! - [`service`]: what systemd hears
//! - [`stop_signals`]: Ctrl-C, and what programs send
//! - [`supervisor`]: the loop over everything that can happen
//! - [`greeting`]: what is printed once requests are welcome

mod detach;
mod greeting;
pub(crate) mod log;
mod managed;
mod plan;
mod process;
mod restart;
mod service;
pub(crate) mod state_dir;
mod stop_signals;
mod supervisor;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::ExitStatus,
    time::Duration,
};

use crate::{
    config::{Config, ConfigError, DEFAULT_LISTEN, Device, LogFormat, WorkerCount},
    exit::{Exit, Explain},
    home::Home,
    models::FindError,
    terminal::{Format, Terminal},
};
use log::LogSink;
use plan::Plan;
use process::Role;
use state_dir::StateDir;
use supervisor::Supervisor;

/// Arguments of `up`.
#[derive(Debug, clap::Args)]
pub(crate) struct UpArguments {
    /// Starts in the background, and returns when requests are welcome; `holobiont down` stops it
    #[arg(long, short)]
    detach: bool,
    /// Deployment file (TOML); flags and HOLOBIONT_<SECTION>_<FIELD> variables override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Model: a path, a name that `holobiont ls` shows, or ORG/NAME[@REVISION] of a hub
    #[arg(long, value_name = "NAME_OR_PATH")]
    model: Option<String>,
    /// What computes: cpu, cuda, or cuda:1 for another GPU than the first [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
    /// Makes the weights of this number, for measurements: MODEL needs config.json and a tokenizer only
    #[arg(long, value_name = "SEED")]
    random_weights: Option<u64>,
    /// Serves the PEFT adapter in DIR as NAME; may be repeated
    #[arg(long, value_name = "NAME=DIR", value_parser = parse_adapter)]
    adapter: Vec<(String, PathBuf)>,
    // Written out, so that the default stands in one place.
    #[arg(long, value_name = "ADDR:PORT", help = format!("Address to listen on; port 0 takes a free one [default: {DEFAULT_LISTEN}]"))]
    listen: Option<SocketAddr>,
    /// State directory, one deployment each [default: $HOLOBIONT_HOME/state]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Cores to compute on, as 0-3,8 [default: all; of four or more, those without workers]
    #[arg(long, value_name = "LIST")]
    cores: Option<String>,
    /// Processes that compute adapters while they travel to the device, a core each; 0 for none [default: by core count]
    #[arg(long, value_name = "N")]
    workers: Option<WorkerCount>,
    /// Form of the logs [default: human on a terminal, else json]
    #[arg(long, value_enum, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

impl UpArguments {
    /// The highest layer of the configuration.
    fn into_layer(self) -> Config {
        let mut layer = Config::default();
        layer.model.name = self.model;
        layer.model.random_weights = self.random_weights;
        layer.executor.device = self.device;
        layer.gateway.listen = self.listen;
        layer.deployment.state = self.state;
        layer.deployment.log_format = self.log_format;
        layer.executor.cores = self.cores;
        layer.workers.count = self.workers;
        layer.adapters = self.adapter.into_iter().collect();
        layer
    }
}

/// Why a deployment did not start, or ended otherwise than by being asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
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
        /// Which.
        role: Role,
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
        /// Which.
        role: Role,
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
    #[error("{role} stopped before it was ready ({status}); its own message is above")]
    NotReady {
        /// Which.
        role: Role,
        /// How it ended.
        status: ExitStatus,
    },
    /// A process dies again and again.
    #[error("{role} died {deaths} times within {} s, the last time with {status}", restart::WINDOW.as_secs())]
    KeepsDying {
        /// Which.
        role: Role,
        /// How often.
        deaths: usize,
        /// How it ended last.
        status: ExitStatus,
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
            Self::NoProgram { role: Role::Worker(_) } => {
                Some("cargo build --release --bin lora-worker, or go without: --workers 0".into())
            }
            Self::NoProgram { role } => Some(format!("cargo build --release --bin {role}")),
            Self::StateTaken { .. } => {
                Some("holobiont down stops the other one; or give this one its own --state DIR".into())
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

/// Where a deployment runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Until Ctrl-C.
    Front,
    /// Until `holobiont down`.
    Behind,
}

/// Starts a deployment and returns when it has stopped; a detached one when it serves.
pub(crate) fn run(arguments: UpArguments, terminal: Terminal) -> Result<(), UpError> {
    if arguments.detach && !detach::is_behind() {
        return detach::start(terminal);
    }
    let place = if arguments.detach { Place::Behind } else { Place::Front };
    if place == Place::Behind {
        detach::leave_session();
    }
    let home = Home::from_environment();
    let file = arguments.config.clone();
    let config = Config::layered(arguments.into_layer(), file.as_deref())?;
    let state_path = config.deployment.state.clone().unwrap_or_else(|| home.state());
    let state = StateDir::claim(&state_path, config.grace())?;
    check_port(config.listen())?;
    let plan = Plan::new(&config, &home, &state)?;
    let log = LogSink::open(&state.logs()).map_err(|source| UpError::Log { path: state.logs(), source })?;
    start_logs(plan.log_format, terminal, log.clone());

    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(UpError::Runtime)?;
    let result = runtime.block_on(Supervisor::new(plan, &config, place, log.clone(), terminal).run());
    if let Err(error) = &result {
        log.keep(&format!("holobiont up ends: {error}"));
    }
    result
}

/// Says in time, and in words, that a port is taken; the gateway binds it later.
fn check_port(listen: SocketAddr) -> Result<(), UpError> {
    match TcpListener::bind(listen) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(UpError::PortTaken { listen }),
        Err(source) => Err(UpError::Listen { listen, source }),
    }
}

/// The supervisor's own log lines have the form of its children's.
fn start_logs(format: LogFormat, terminal: Terminal, log: LogSink) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(log).with_target(false);
    // A second subscriber cannot be set; a test that runs two deployments keeps the first.
    let _ = match (format, terminal.format) {
        (LogFormat::Json, _) | (_, Format::Json) => builder.json().try_init(),
        (LogFormat::Human, Format::Human) => builder.with_ansi(false).try_init(),
    };
}

fn parse_adapter(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, directory)) if !name.is_empty() && !directory.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(directory)))
        }
        _ => Err("write NAME=DIR, as in pirate=examples/adapters/pirate".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_a_name_and_a_directory() {
        assert_eq!(parse_adapter("a=/x=y"), Ok(("a".into(), PathBuf::from("/x=y"))));
        for wrong in ["a", "=b", "a=", ""] {
            assert!(parse_adapter(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_taken_port_is_a_conflict_that_names_the_port() {
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let listen = holder.local_addr().unwrap();
        let error = check_port(listen).unwrap_err();
        assert_eq!(error.exit(), Exit::Conflict);
        assert!(error.to_string().contains(&listen.port().to_string()), "{error}");
    }
}
