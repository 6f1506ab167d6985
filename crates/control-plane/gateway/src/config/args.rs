//! The command line: every flag, its default and its environment variable.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use scheduling::routing::RoutingPolicy;

use security::address::NotHostPort;
use settings::{ByteCount, Fraction, LogFormat, ReasoningParser, ServiceClass, ToolCallParser};

use super::values::{ConnectionLimits, ExecutorEndpoint, NamedEndpoint, StartAdapter, TrainingLimits};
use crate::tenant_memory::MemoryLimits;

/// The gateway: OpenAI's HTTP API in front of a base-executor.
#[derive(Debug, Clone, Parser)]
#[command(name = "gateway", version, about, mut_args(settings::described))]
pub struct Args {
    /// Settings about executors.
    #[command(flatten)]
    pub executors: ExecutorArgs,
    /// Where to serve HTTP; beyond loopback only with --api-key-file or --insecure
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: SocketAddr,
    /// Directory for what must outlive the process: the adapter registry
    #[arg(long, value_name = "DIR")]
    pub state: PathBuf,
    /// What the base model is called [default: from its file name]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// How the model writes calls of tools
    #[arg(long, value_name = "FORMAT")]
    pub tool_call_parser: ToolCallParser,
    /// What stands around the model's thoughts
    #[arg(long, value_name = "TAGS")]
    pub reasoning_parser: ReasoningParser,
    /// Settings about adapters.
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// Settings about callers.
    #[command(flatten)]
    pub callers: CallerArgs,
    /// Settings about connections.
    #[command(flatten)]
    pub connections: ConnectionArgs,
    /// Settings about figures.
    #[command(flatten)]
    pub figures: TelemetryArgs,
    /// Settings about the queue.
    #[command(flatten)]
    pub admission: AdmissionArgs,
    /// Settings about fine-tuning.
    #[command(flatten)]
    pub training: TrainingArgs,
    /// Milliseconds that running requests get to end after SIGTERM
    #[arg(long, value_name = "N")]
    pub grace_ms: u64,
    /// Milliseconds after which an executor that owes an answer and is silent counts as lost
    #[arg(long, value_name = "N")]
    pub executor_timeout_ms: u64,
    /// Threads that move messages; text work has its own
    #[arg(long, value_name = "N")]
    pub threads: usize,
    /// How to write the log to stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Human)]
    pub log_format: LogFormat,
    /// Stop in order when standard input ends: whoever started this process is gone then
    #[arg(long)]
    pub exit_with_stdin: bool,
}

/// Settings about where executors are.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct ExecutorArgs {
    /// The executor's ipc socket
    #[arg(long, env = "HOLOBIONT_SOCKET", value_name = "PATH", required_unless_present = "executors")]
    pub socket: Option<PathBuf>,
    /// One of several executors in the place of --socket: its name, and its ipc socket or, on another host,
    /// tls://HOST:PORT; may be given many times
    #[arg(
        long = "executor",
        env = "HOLOBIONT_EXECUTORS",
        value_name = "NAME=PATH",
        value_delimiter = ',',
        value_parser = named_place
    )]
    pub executors: Vec<NamedEndpoint>,
    /// Certificate authority of executors on other hosts [default: the system's]
    #[arg(long, value_name = "PEM")]
    pub executor_ca: Option<PathBuf>,
    /// Certificate that executors on other hosts are shown
    #[arg(long, value_name = "PEM", requires = "executor_cert_key")]
    pub executor_cert: Option<PathBuf>,
    /// The certificate's private key
    #[arg(long, value_name = "PEM", requires = "executor_cert")]
    pub executor_cert_key: Option<PathBuf>,
    /// The model, whose tokenizer is read while executors load it; of those on other hosts, too: a file, a directory, or a
    /// name of a hub
    #[arg(long, value_name = "NAME_OR_PATH")]
    pub model: Option<String>,
    /// How one of several executors is chosen for a request
    #[arg(long, value_name = "POLICY")]
    pub routing: RoutingPolicy,
}

/// Settings about adapters.
#[derive(Debug, Clone, clap::Args)]
pub struct AdapterArgs {
    /// An adapter to load at start; may be given many times
    #[arg(long = "adapter", value_name = "NAME=DIR", value_parser = start_adapter)]
    pub start_adapters: Vec<StartAdapter>,
    /// Adapters loaded over HTTP must be in here
    #[arg(long, value_name = "DIR")]
    pub adapter_root: PathBuf,
    /// Most adapters the registry holds
    #[arg(long, value_name = "N")]
    pub max_adapters: usize,
    /// Longest file of an adapter
    #[arg(long, value_name = "N")]
    pub max_adapter_file_bytes: ByteCount,
    /// A PostgreSQL that many hosts have as their registry
    #[arg(long, value_name = "URL")]
    pub registry: Option<String>,
    /// A bucket that many hosts keep adapters in
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Adapters of that bucket on this host
    #[arg(long, value_name = "N")]
    pub store_cache_bytes: ByteCount,
}

/// Settings about who may ask, and how often.
#[derive(Debug, Clone, clap::Args)]
pub struct CallerArgs {
    /// File of hashed API keys, kept by 'holobiont key' [default: $CREDENTIALS_DIRECTORY/api-keys if there is
    /// one, otherwise no key is asked for]
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Take API keys from --registry, and keep them in --api-key-file
    #[arg(long)]
    pub shared_keys: bool,
    /// Serve without keys beyond loopback and under any host name: whoever reaches the port is an administrator
    #[arg(long)]
    pub insecure: bool,
    /// Most requests a minute for each key that has no limit of its own; 0 is no limit
    #[arg(long, value_name = "N")]
    pub requests_per_min_per_key: u32,
    /// Most requests a minute for each adapter; 0 is no limit
    #[arg(long, value_name = "N")]
    pub requests_per_min_per_adapter: u32,
    /// A service class: {name="gold",tenants=["alice"],weight=3,ttft_ms=500}; may be given many times
    #[arg(long = "class", value_name = "TABLE")]
    pub classes: Vec<ServiceClass>,
    /// Web pages of these origins may ask from a browser: 'https://a.example,https://b.example' [default: none]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    pub cors_origins: Vec<String>,
}

/// Settings about who may wait.
#[derive(Debug, Clone, clap::Args)]
pub struct AdmissionArgs {
    /// Most sequences that wait for their turn; more are answered with 429
    #[arg(long, value_name = "N")]
    pub max_sequences: usize,
    /// Milliseconds that the requests of a tenant may wait for their turn for any length of time
    #[arg(long, value_name = "N")]
    pub codel_target_ms: u64,
    /// Milliseconds for which they may wait longer than that, as in a burst; then new ones are answered with 429
    #[arg(long, value_name = "N")]
    pub codel_interval_ms: u64,
    /// Of an executor's places, those that tenants have together that want more than their part, beside others
    #[arg(long, value_name = "SHARE")]
    pub burst_share: Fraction,
}

/// Settings about connections.
#[derive(Debug, Clone, clap::Args)]
pub struct ConnectionArgs {
    /// Longest body of a request
    #[arg(long, value_name = "N")]
    pub max_body_bytes: ByteCount,
    /// Memory for what requests keep, all tenants together
    #[arg(long, value_name = "N")]
    pub memory_bytes: ByteCount,
    /// The part of it that one tenant may have; more is answered with 429
    #[arg(long, value_name = "N")]
    pub tenant_memory_bytes: ByteCount,
    /// Most open connections; more are answered with 503
    #[arg(long, value_name = "N")]
    pub max_connections: usize,
    /// Milliseconds within which a request's header must come, and after which an idle connection is closed
    #[arg(long, value_name = "N")]
    pub header_timeout_ms: u64,
    /// Milliseconds within which a request's body must come
    #[arg(long, value_name = "N")]
    pub body_timeout_ms: u64,
    /// Milliseconds after which a reader that takes nothing is cut off and its request cancelled
    #[arg(long, value_name = "N")]
    pub client_write_timeout_ms: u64,
}

/// Settings about figures and traces.
#[derive(Debug, Clone, clap::Args)]
pub struct TelemetryArgs {
    /// Write vLLM's metric names beside our own
    #[arg(long)]
    pub vllm_metrics: bool,
    /// Most adapters with metrics of their own; the others share the label 'other'
    #[arg(long, value_name = "N")]
    pub max_adapter_labels: usize,
    /// Workers that there should be beside the executor; fewer are shown as missing. Of several executors a number each, in
    /// the order of --executor, or one for all
    #[arg(
        long,
        env = "HOLOBIONT_EXPECTED_WORKERS",
        value_name = "N,N",
        value_delimiter = ',',
        default_value = "0"
    )]
    pub expected_workers: Vec<u32>,
    /// Send traces to this OpenTelemetry collector (OTLP over HTTP)
    #[cfg(feature = "otel")]
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}

/// Settings about fine-tuning.
#[derive(Debug, Clone, clap::Args)]
pub struct TrainingArgs {
    /// The socket at which trainers are asked for; without it nothing is trained
    #[arg(long, env = "HOLOBIONT_TRAINER_SOCKET", value_name = "PATH")]
    pub trainer_socket: Option<PathBuf>,
    /// Trainers that the service at that socket starts at once; with 0 nothing is trained
    #[arg(long, env = "HOLOBIONT_MAX_TRAINERS", value_name = "N")]
    pub max_trainers: Option<u32>,
    /// Most fine-tuning jobs of a tenant that wait or are under way; more are answered with 429
    #[arg(long, value_name = "N")]
    pub tenant_jobs: usize,
    /// Steps of a fine-tuning job between two checkpoints, from which it goes on when a process or a host is lost
    #[arg(long, value_name = "N")]
    pub checkpoint_steps: u32,
    /// Longest file of training data
    #[arg(long, value_name = "N")]
    pub max_training_file_bytes: ByteCount,
    /// Most bytes of a tenant's files of training data
    #[arg(long, value_name = "N")]
    pub tenant_training_bytes: ByteCount,
    /// Most bytes of a tenant's states of training order by order; more are refused
    #[arg(long, value_name = "N")]
    pub tenant_state_bytes: ByteCount,
}

fn named_place(text: &str) -> Result<NamedEndpoint, String> {
    let (name, place) = match text.split_once('=') {
        Some((name, place)) if settings::is_process_name(name) && !place.is_empty() => {
            (name.to_owned(), place)
        }
        _ => {
            let wanted = "expected NAME=PATH or NAME=tls://HOST:PORT; a name has lower-case letters, digits and '-', 32 at most";
            return Err(wanted.to_owned());
        }
    };
    let place = match place.strip_prefix("tls://") {
        Some(address) => {
            ExecutorEndpoint::Host(address.parse().map_err(|error: NotHostPort| error.to_string())?)
        }
        None => ExecutorEndpoint::Socket(PathBuf::from(place)),
    };
    Ok(NamedEndpoint { name, place })
}

fn start_adapter(text: &str) -> Result<StartAdapter, String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(StartAdapter { name: name.to_owned(), path: PathBuf::from(path) })
        }
        _ => Err("expected NAME=DIR".to_owned()),
    }
}

impl From<&ConnectionArgs> for ConnectionLimits {
    fn from(args: &ConnectionArgs) -> Self {
        Self {
            max_body_bytes: args.max_body_bytes.as_usize(),
            memory: MemoryLimits {
                tenant_bytes: args.tenant_memory_bytes.as_usize(),
                total_bytes: args.memory_bytes.as_usize(),
            },
            max_connections: args.max_connections,
            header_timeout: Duration::from_millis(args.header_timeout_ms),
            body_timeout: Duration::from_millis(args.body_timeout_ms),
            stall_timeout: Duration::from_millis(args.client_write_timeout_ms),
        }
    }
}

impl From<TrainingArgs> for TrainingLimits {
    fn from(args: TrainingArgs) -> Self {
        Self {
            trainer_socket: args.trainer_socket.filter(|_| args.max_trainers != Some(0)),
            tenant_jobs: args.tenant_jobs,
            checkpoint_steps: args.checkpoint_steps,
            max_file_bytes: args.max_training_file_bytes.0,
            tenant_bytes: args.tenant_training_bytes.0,
            tenant_state_bytes: args.tenant_state_bytes.0,
        }
    }
}
