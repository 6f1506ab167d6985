//! Command line and environment, turned into one checked [`Config`].

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Parser, ValueEnum};

use crate::auth::{KeyFileError, Keys};

/// `sun_path` without its final zero.
const MAX_SOCKET_BYTES: usize = 107;

/// The gateway: OpenAI's HTTP API in front of a base-executor.
#[derive(Debug, Clone, Parser)]
#[command(name = "gateway", version, about)]
pub struct Args {
    /// The executor's ipc socket
    #[arg(long, env = "HOLOBIONT_SOCKET", value_name = "PATH")]
    pub socket: PathBuf,
    /// Where to serve HTTP; beyond loopback only with --api-key-file or --insecure
    #[arg(long, env = "HOLOBIONT_LISTEN", value_name = "ADDR:PORT", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Directory for what must outlive the process: the adapter registry
    #[arg(long, env = "HOLOBIONT_STATE", value_name = "DIR")]
    pub state: PathBuf,
    /// What the base model is called [default: from its file name]
    #[arg(long, env = "HOLOBIONT_SERVED_MODEL_NAME", value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// An adapter to load at start; may be given many times
    #[arg(long = "adapter", value_name = "NAME=DIR", value_parser = start_adapter)]
    pub adapters: Vec<StartAdapter>,
    /// Adapters loaded over HTTP must be in here
    #[arg(long, env = "HOLOBIONT_ADAPTER_ROOT", value_name = "DIR", default_value = ".")]
    pub adapter_root: PathBuf,
    /// File with one 'role:key' a line, roles admin and user [default: no key is asked for]
    #[arg(long, env = "HOLOBIONT_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Serve beyond loopback without keys: anybody who reaches the port is an administrator
    #[arg(long, env = "HOLOBIONT_INSECURE")]
    pub insecure: bool,
    /// Longest body of a request
    #[arg(long, env = "HOLOBIONT_MAX_BODY_BYTES", value_name = "N", default_value_t = 8 << 20)]
    pub max_body_bytes: usize,
    /// Most sequences under way at once; more are answered with 429
    #[arg(long, env = "HOLOBIONT_MAX_SEQUENCES", value_name = "N", default_value_t = 4096)]
    pub max_sequences: usize,
    /// Seconds that running requests get to end after SIGTERM
    #[arg(long, env = "HOLOBIONT_GRACE_S", value_name = "N", default_value_t = 10)]
    pub grace_s: u64,
    /// Threads that move messages; text work has its own
    #[arg(long, env = "HOLOBIONT_GATEWAY_THREADS", value_name = "N", default_value_t = 1)]
    pub threads: usize,
    /// How to write the log to stderr
    #[arg(long, env = "HOLOBIONT_LOG_FORMAT", value_enum, default_value_t = LogFormat::Human)]
    pub log_format: LogFormat,
    /// Stop in order when standard input ends: whoever started this process is gone then
    #[arg(long)]
    pub exit_with_stdin: bool,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
    /// For people on a terminal, otherwise JSON.
    Auto,
}

/// What ends the process, beside SIGTERM and SIGINT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifeline {
    /// The end of standard input.
    Stdin,
    /// Nothing else.
    Signals,
}

/// An adapter to load at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartAdapter {
    /// What it is called.
    pub name: String,
    /// Where its files are.
    pub path: PathBuf,
}

/// Why the arguments cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// An open port without keys.
    #[error(
        "--listen {0} is reachable by others and no key is asked for; give --api-key-file, listen on 127.0.0.1, or say --insecure"
    )]
    OpenPort(SocketAddr),
    /// Longer than the system takes.
    #[error("--socket '{}' is longer than {MAX_SOCKET_BYTES} bytes, which is all the system takes; use a shorter path", .0.display())]
    SocketPath(PathBuf),
    /// The adapter root is not there.
    #[error("--adapter-root '{}' cannot be opened: {reason}; create it or give another", path.display())]
    AdapterRoot {
        /// As given.
        path: PathBuf,
        /// What the system said.
        reason: std::io::Error,
    },
    /// The key file cannot be used.
    #[error(transparent)]
    Keys(#[from] KeyFileError),
    /// A number that makes no sense.
    #[error("--{name} must be at least {least}")]
    TooSmall {
        /// The option.
        name: &'static str,
        /// The least it may be.
        least: usize,
    },
    /// The name is empty or could be taken for `base:adapter`.
    #[error(
        "--served-model-name '{0}' cannot be a name; use 1 to 256 characters without ':' and control characters"
    )]
    ModelName(String),
}

/// Checked settings.
#[derive(Debug)]
pub struct Config {
    /// The executor's ipc socket.
    pub socket: PathBuf,
    /// Where to serve HTTP.
    pub listen: SocketAddr,
    /// Directory of the registry.
    pub state: PathBuf,
    /// What the base model is called; `None` takes it from its file name.
    pub served_model_name: Option<String>,
    /// Loaded at start.
    pub adapters: Vec<StartAdapter>,
    /// Absolute and without links.
    pub adapter_root: PathBuf,
    /// Who may ask.
    pub keys: Keys,
    /// Longest body of a request.
    pub max_body_bytes: usize,
    /// Most sequences under way at once.
    pub max_sequences: usize,
    /// How long running requests get to end.
    pub grace: Duration,
    /// Threads that move messages.
    pub threads: usize,
    /// How to write the log.
    pub log_format: LogFormat,
    /// What ends the process.
    pub lifeline: Lifeline,
}

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        let keys = args.api_key_file.as_deref().map_or_else(|| Ok(Keys::none()), Keys::read)?;
        if args.api_key_file.is_none() && !args.listen.ip().is_loopback() && !args.insecure {
            return Err(ConfigError::OpenPort(args.listen));
        }
        if args.socket.as_os_str().len() > MAX_SOCKET_BYTES {
            return Err(ConfigError::SocketPath(args.socket));
        }
        let sizes = [("threads", args.threads, 1), ("max-sequences", args.max_sequences, 1)];
        let sizes = sizes.into_iter().chain([("max-body-bytes", args.max_body_bytes, 1024)]);
        for (name, value, least) in sizes {
            if value < least {
                return Err(ConfigError::TooSmall { name, least });
            }
        }
        if let Some(name) = &args.served_model_name
            && (name.is_empty() || name.len() > 256 || name.chars().any(|c| c == ':' || c.is_control()))
        {
            return Err(ConfigError::ModelName(name.clone()));
        }
        Ok(Self {
            socket: args.socket,
            listen: args.listen,
            state: args.state,
            served_model_name: args.served_model_name,
            adapters: args.adapters,
            adapter_root: adapter_root(&args.adapter_root)?,
            keys,
            max_body_bytes: args.max_body_bytes,
            max_sequences: args.max_sequences,
            grace: Duration::from_secs(args.grace_s),
            threads: args.threads,
            log_format: args.log_format,
            lifeline: if args.exit_with_stdin { Lifeline::Stdin } else { Lifeline::Signals },
        })
    }
}

fn adapter_root(path: &Path) -> Result<PathBuf, ConfigError> {
    path.canonicalize().map_err(|reason| ConfigError::AdapterRoot { path: path.to_owned(), reason })
}

fn start_adapter(text: &str) -> Result<StartAdapter, String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(StartAdapter { name: name.to_owned(), path: PathBuf::from(path) })
        }
        _ => Err("expected NAME=DIR".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(extra: &[&str]) -> Result<Config, ConfigError> {
        let base = ["gateway", "--socket", "s", "--state", "d"];
        Args::try_parse_from(base.iter().chain(extra)).unwrap().try_into()
    }

    #[test]
    fn an_open_port_without_keys_is_refused_unless_said_to_be_meant() {
        assert!(matches!(config(&["--listen", "0.0.0.0:80"]), Err(ConfigError::OpenPort(_))));
        config(&["--listen", "0.0.0.0:80", "--insecure"]).unwrap();
        config(&["--listen", "[::1]:80"]).unwrap();
    }

    #[test]
    fn adapters_are_given_by_name_and_directory() {
        let config = config(&["--adapter", "a=dir/a", "--adapter", "b=dir=b"]).unwrap();
        let b = StartAdapter { name: "b".to_owned(), path: PathBuf::from("dir=b") };
        assert_eq!((config.adapters.len(), &config.adapters[1]), (2, &b));
    }

    #[test]
    fn a_model_name_with_a_colon_is_refused() {
        assert!(matches!(config(&["--served-model-name", "a:b"]), Err(ConfigError::ModelName(_))));
    }
}
