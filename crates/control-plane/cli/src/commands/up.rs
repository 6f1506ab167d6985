//! `holobiont up`: starts a deployment's processes, keeps them alive, stops them in order.
//!
//! # Layout
//!
//! - [`detach`]: the deployment in the background
//! - [`errors`]: errors of `up`
//! - [`log`]: log lines of all processes, in a file of bounded size
//! - [`plan`]: a configuration turned into checked command lines
//! - [`state_dir`]: the state directory's lock and the private run directory of one start
//! - [`process`]: one child process; [`supervised`]: a process over its restarts; [`processes`]: all
//!   processes
//! - [`restart`]: delay and limit of restarts
//! - [`sd_notify`]: status and heartbeats of children; [`service`]: notifications to systemd
//! - [`stop`]: progress of a stop
//! - [`supervisor`]: the event loop over all processes
//! - [`banner`]: the text printed once the gateway is ready

mod banner;
mod detach;
mod errors;
mod log;
mod plan;
mod process;
mod processes;
mod restart;
mod sd_notify;
mod service;
mod state_dir;
mod stop;
mod supervised;
mod supervisor;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
};

use settings::{LogFormat, SettingFlags, renamed};

use crate::{
    deployment::{
        config::{DeploymentConfig, DeploymentConfigError},
        paths::log_directory,
    },
    home::HomeDirectory,
    terminal::{PrintFormat, Terminal},
};
use detach::ForegroundMode;
use errors::UpError;
use log::LogSink;
use plan::StartPlan;
use state_dir::StateDir;
use supervisor::Supervisor;

#[derive(Debug, clap::Args)]
pub(crate) struct UpArguments {
    /// Runs in the background, and returns when the deployment is ready; `holobiont down` stops it
    #[arg(long, short)]
    detach: bool,
    /// Deployment file (TOML); flags and environment variables override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serves the PEFT adapter in DIR as NAME; may be repeated
    #[arg(long, value_name = "NAME=DIR", value_parser = parse_adapter)]
    adapter: Vec<(String, PathBuf)>,
    #[command(flatten)]
    settings: SettingFlags,
}

impl UpArguments {
    /// Returns the flags as the configuration layer of highest priority.
    fn into_layer(self) -> Result<DeploymentConfig, DeploymentConfigError> {
        let mut layer = DeploymentConfig::from_flags(&self.settings)?;
        layer.adapters = self.adapter.into_iter().collect();
        Ok(layer)
    }
}

/// Starts a deployment and returns when it has stopped. With `--detach`, returns when the deployment
/// serves.
pub(crate) fn run(arguments: UpArguments, terminal: Terminal) -> Result<(), UpError> {
    if arguments.detach && !detach::is_behind() {
        return detach::start(terminal);
    }
    let place = if arguments.detach { ForegroundMode::Behind } else { ForegroundMode::Front };
    if place == ForegroundMode::Behind {
        detach::leave_session();
    }
    let home = HomeDirectory::from_environment();
    let file = arguments.config.clone();
    let config = DeploymentConfig::layered(arguments.into_layer()?, file.as_deref())?;
    let state_path = config.deployment.state.clone().unwrap_or_else(|| home.state());
    let state = StateDir::claim(&state_path, config.grace())?;
    if config.serves_layers() {
        state.link_layer_sockets()?;
    }
    check_port(config.listen())?;
    let plan = StartPlan::new(&config, &home, &state)?;
    let log = LogSink::open(&state.logs())
        .map_err(|source| UpError::Log { path: log_directory(&state_path), source })?;
    start_logs(plan.log_format, terminal, log.clone());
    config.renamed.iter().chain(&renamed::in_use()).for_each(|renamed| tracing::warn!("{renamed}"));
    plan.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));

    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(UpError::Runtime)?;
    let result = runtime.block_on(Supervisor::new(plan, &config, place, log.clone(), terminal).run());
    if let Err(error) = &result {
        log.keep(&format!("holobiont up ends: {error}"));
    }
    result
}

/// Reports a taken port before any process starts; the gateway binds the port later.
fn check_port(listen: SocketAddr) -> Result<(), UpError> {
    match TcpListener::bind(listen) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(UpError::PortTaken { listen }),
        Err(source) => Err(UpError::Listen { listen, source }),
    }
}

/// Starts the supervisor's log in the format of its children's logs.
fn start_logs(format: LogFormat, terminal: Terminal, log: LogSink) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(log).with_target(false);
    // A second subscriber cannot be set; a test that runs two deployments keeps the first.
    let _ = match (format, terminal.format) {
        (LogFormat::Json, _) | (_, PrintFormat::Json) => builder.json().try_init(),
        (LogFormat::Human | LogFormat::Auto, PrintFormat::Human) => builder.with_ansi(false).try_init(),
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
    use crate::exit::{Exit, Explain as _};

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
