//! The command line: every flag, its default and its environment variable.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use scheduling::routing::RoutingPolicy;

use security::address::NotHostPort;
use settings::{BaseOption, ByteCount, Fraction, LogFormat, ReasoningParser, ServiceClass, ToolCallParser};

use super::values::{ConnectionLimits, ExecutorEndpoint, NamedEndpoint, StartAdapter, TrainingLimits};
use crate::{served_base::ONLY_BASE, tenant_memory::MemoryLimits};

/// The gateway serves OpenAI's HTTP API in front of a base-executor.
#[derive(Debug, Clone, Parser)]
#[command(name = "gateway", version, about, mut_args(settings::described))]
pub struct Args {
    /// Settings of the executors' endpoints.
    #[command(flatten)]
    pub executors: ExecutorArgs,
    /// Address of the HTTP server; beyond loopback only with --api-key-file or --insecure
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: SocketAddr,
    /// Directory of persistent state, such as the adapter registry
    #[arg(long, value_name = "DIR")]
    pub state: PathBuf,
    /// Name of the base model [default: from its file name]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Format of tool calls in the model's output
    #[arg(long, value_name = "FORMAT")]
    pub tool_call_parser: ToolCallParser,
    /// Tags around the model's reasoning content
    #[arg(long, value_name = "TAGS")]
    pub reasoning_parser: ReasoningParser,
    /// Settings of the bases.
    #[command(flatten)]
    pub bases: BasesArgs,
    /// Settings of the scoring routes.
    #[command(flatten)]
    pub scoring: ScoringArgs,
    /// Settings of the adapters.
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// Settings of keys and rate limits.
    #[command(flatten)]
    pub callers: CallerArgs,
    /// Settings of the connections.
    #[command(flatten)]
    pub connections: ConnectionArgs,
    /// Settings of metrics and traces.
    #[command(flatten)]
    pub telemetry: TelemetryArgs,
    /// Settings of KV events.
    #[command(flatten)]
    pub kv_events: KvEventArgs,
    /// Settings of the admission queue.
    #[command(flatten)]
    pub admission: AdmissionArgs,
    /// Settings of fine-tuning jobs.
    #[command(flatten)]
    pub training: TrainingArgs,
    /// Time in milliseconds for running requests to end after SIGTERM
    #[arg(long, value_name = "N")]
    pub grace_ms: u64,
    /// Maximum time in milliseconds without a message of an executor with running requests, before it counts
    /// as lost
    #[arg(long, value_name = "N")]
    pub executor_timeout_ms: u64,
    /// Number of threads for network I/O; text work has threads of its own
    #[arg(long, value_name = "N")]
    pub threads: usize,
    /// Format of the log on stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Human)]
    pub log_format: LogFormat,
    /// Exits at the end of standard input, as on SIGTERM, because the supervisor is gone
    #[arg(long)]
    pub exit_with_stdin: bool,
}

/// Settings of the executors' endpoints.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct ExecutorArgs {
    /// Path of the executor's ipc socket
    #[arg(long, env = "HOLOBIONT_SOCKET", value_name = "PATH", required_unless_present = "executors")]
    pub socket: Option<PathBuf>,
    /// One of several executors in place of --socket: its name, and its ipc socket or, on another host,
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
    /// Client certificate of the gateway for executors on other hosts
    #[arg(long, value_name = "PEM", requires = "executor_cert_key")]
    pub executor_cert: Option<PathBuf>,
    /// Private key of the client certificate
    #[arg(long, value_name = "PEM", requires = "executor_cert")]
    pub executor_cert_key: Option<PathBuf>,
    /// Model whose tokenizer is read while executors load: a file, a directory, or a name of a hub; required
    /// for executors on other hosts
    #[arg(long, value_name = "NAME_OR_PATH")]
    pub model: Option<String>,
    /// Policy that chooses one of several executors for a request
    #[arg(long, value_name = "POLICY")]
    pub routing: RoutingPolicy,
}

/// Settings of several bases, and of their sleep.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct BasesArgs {
    /// Name of the first base in administration
    #[arg(long, value_name = "NAME", default_value = ONLY_BASE)]
    pub base_name: String,
    /// Base beside the first: {name="small",served_name="small",executors={small="PATH"}}; may be given many
    /// times
    #[arg(long = "base", value_name = "TABLE")]
    pub bases: Vec<BaseOption>,
    /// Time in seconds without requests after which the first base sleeps; 0 is never
    #[arg(long, value_name = "N")]
    pub sleep_after_s: u64,
    /// Maximum time in milliseconds that a request waits until a sleeping base serves
    #[arg(long, value_name = "N")]
    pub wake_timeout_ms: u64,
    /// Asks the reader of standard output to end and start the executors of sleeping bases, as `holobiont up`
    /// does; without it no base sleeps
    #[arg(long)]
    pub supervised: bool,
    /// Bases whose executors do not run at the start
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    pub asleep: Vec<String>,
    /// Host memory of the first base's executors
    #[arg(long, value_name = "N", default_value = "0")]
    pub base_host_bytes: ByteCount,
    /// Host memory that all bases that are awake may use together [default: no limit]
    #[arg(long, value_name = "N")]
    pub bases_host_bytes: Option<ByteCount>,
}

/// Settings of the scoring routes.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct ScoringArgs {
    /// Tokens whose logits after a prompt classify or score texts, as 'no,yes' [default: none]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    pub classifier_from_token: Vec<String>,
    /// File with the prompt that scores a document for a query [default: the prompt of Qwen3-Reranker]
    #[arg(long, value_name = "FILE")]
    pub score_template: Option<PathBuf>,
}

/// Settings of the adapters.
#[derive(Debug, Clone, clap::Args)]
pub struct AdapterArgs {
    /// Adapter to load at start; may be given many times
    #[arg(long = "adapter", value_name = "NAME=DIR", value_parser = start_adapter)]
    pub start_adapters: Vec<StartAdapter>,
    /// Directory that contains all adapters loaded over HTTP
    #[arg(long, value_name = "DIR")]
    pub adapter_root: PathBuf,
    /// Maximum number of registered adapters
    #[arg(long, value_name = "N")]
    pub max_adapters: usize,
    /// Maximum size of one file of an adapter
    #[arg(long, value_name = "N")]
    pub max_adapter_file_bytes: ByteCount,
    /// Maximum size of all ephemeral adapters
    #[arg(long, value_name = "N")]
    pub ephemeral_adapter_bytes: ByteCount,
    /// Memory file system of ephemeral adapters
    #[arg(long, value_name = "DIR")]
    pub ephemeral_adapter_dir: PathBuf,
    /// Prefixes of URIs from which adapters may be fetched: 'hf://ORG,s3://BUCKET/PREFIX' [default: none]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    pub allowed_adapter_uris: Vec<String>,
    /// Maximum size of the adapters that one tenant's requests loaded by URI
    #[arg(long, value_name = "N")]
    pub tenant_fetched_bytes: ByteCount,
    /// Time limit of one fetch by URI, in milliseconds
    #[arg(long, value_name = "N")]
    pub fetch_timeout_ms: u64,
    /// Time in milliseconds for which a failed fetch is not tried again
    #[arg(long, value_name = "N")]
    pub fetch_failure_ms: u64,
    /// PostgreSQL registry that many hosts share
    #[arg(long, value_name = "URL")]
    pub registry: Option<String>,
    /// Bucket of adapters that many hosts share
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Maximum size of the bucket's cache on this host
    #[arg(long, value_name = "N")]
    pub store_cache_bytes: ByteCount,
}

/// Keys and rate limits of callers.
#[derive(Debug, Clone, clap::Args)]
pub struct CallerArgs {
    /// File of hashed API keys, kept by 'holobiont key' [default: $CREDENTIALS_DIRECTORY/api-keys if there is
    /// one, otherwise no key is required]
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Takes API keys from --registry, and keeps them in --api-key-file
    #[arg(long)]
    pub shared_keys: bool,
    /// Allows any address and any host name without API keys; each client is an administrator
    #[arg(long)]
    pub insecure: bool,
    /// Maximum number of requests per minute of a key without a limit of its own; 0 is no limit
    #[arg(long, value_name = "N")]
    pub requests_per_min_per_key: u32,
    /// Maximum number of requests per minute of an adapter; 0 is no limit
    #[arg(long, value_name = "N")]
    pub requests_per_min_per_adapter: u32,
    /// Service class: {name="gold",tenants=["alice"],weight=3,ttft_ms=500}; may be given many times
    #[arg(long = "class", value_name = "TABLE")]
    pub classes: Vec<ServiceClass>,
    /// Origins whose web pages may send requests: 'https://a.example,https://b.example' [default: none]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    pub cors_origins: Vec<String>,
}

/// Settings of the admission queue.
#[derive(Debug, Clone, clap::Args)]
pub struct AdmissionArgs {
    /// Maximum number of sequences in the admission queue; more are answered 429
    #[arg(long, value_name = "N")]
    pub max_sequences: usize,
    /// CoDel target: queue delay of a tenant in milliseconds that is acceptable at all times
    #[arg(long, value_name = "N")]
    pub codel_target_ms: u64,
    /// CoDel interval in milliseconds: a tenant above the target for this time gets 429 for new requests
    #[arg(long, value_name = "N")]
    pub codel_interval_ms: u64,
    /// Share of an executor's batch slots that over-quota tenants hold together while others are under quota
    #[arg(long, value_name = "SHARE")]
    pub burst_share: Fraction,
    /// Share of an executor's batch slots for the lines of batches while there are no online requests
    #[arg(long, value_name = "SHARE")]
    pub background_share: Fraction,
    /// Number of lines of batches per executor that run beside online requests
    #[arg(long, value_name = "N")]
    pub background_beside: usize,
    /// Maximum number of a tenant's batches that wait or run; more are answered 429
    #[arg(long, value_name = "N")]
    pub tenant_batches: usize,
}

/// Settings of the connections.
#[derive(Debug, Clone, clap::Args)]
pub struct ConnectionArgs {
    /// Maximum size of a request's body
    #[arg(long, value_name = "N")]
    pub max_body_bytes: ByteCount,
    /// Memory for what requests keep in the gateway, all tenants together
    #[arg(long, value_name = "N")]
    pub memory_bytes: ByteCount,
    /// Maximum memory for one tenant's requests in the gateway; further requests are answered 429
    #[arg(long, value_name = "N")]
    pub tenant_memory_bytes: ByteCount,
    /// Maximum number of open connections; more are answered 503
    #[arg(long, value_name = "N")]
    pub max_connections: usize,
    /// Timeout of a request's header and of an idle connection, in milliseconds
    #[arg(long, value_name = "N")]
    pub header_timeout_ms: u64,
    /// Timeout of a request's body, in milliseconds
    #[arg(long, value_name = "N")]
    pub body_timeout_ms: u64,
    /// Timeout of a client that reads nothing, in milliseconds; its request is cancelled
    #[arg(long, value_name = "N")]
    pub client_write_timeout_ms: u64,
}

/// Settings of metrics and traces.
#[derive(Debug, Clone, clap::Args)]
pub struct TelemetryArgs {
    /// Adds vLLM's metric names to this gateway's own
    #[arg(long)]
    pub vllm_metrics: bool,
    /// Maximum number of adapters with metrics of their own; the others share the label 'other'
    #[arg(long, value_name = "N")]
    pub max_adapter_labels: usize,
    /// Expected workers of the executor; fewer are shown as missing. For several executors one number for
    /// each, in the order of --executor, or one for all
    #[arg(
        long,
        env = "HOLOBIONT_EXPECTED_WORKERS",
        value_name = "N,N",
        value_delimiter = ',',
        default_value = "0"
    )]
    pub expected_workers: Vec<u32>,
    /// Endpoint of an OpenTelemetry collector for traces (OTLP over HTTP)
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}

/// Settings of KV events.
#[derive(Debug, Clone, clap::Args)]
pub struct KvEventArgs {
    /// Address that publishes KV events over ZeroMQ, without authentication; the events contain the token ids
    /// of all prompts
    #[arg(long, value_name = "tcp://HOST:PORT")]
    pub kv_events_endpoint: Option<String>,
    /// Address that repeats missed KV events
    #[arg(long, value_name = "tcp://HOST:PORT", requires = "kv_events_endpoint")]
    pub kv_events_replay_endpoint: Option<String>,
    /// Topic of KV events
    #[arg(long, value_name = "TOPIC")]
    pub kv_events_topic: String,
}

/// Settings of fine-tuning jobs.
#[derive(Debug, Clone, clap::Args)]
pub struct TrainingArgs {
    /// Socket of the trainer service; without it there is no training
    #[arg(long, env = "HOLOBIONT_TRAINER_SOCKET", value_name = "PATH")]
    pub trainer_socket: Option<PathBuf>,
    /// Maximum number of trainers that the service at that socket runs at once; with 0 there is no training
    #[arg(long, env = "HOLOBIONT_MAX_TRAINERS", value_name = "N")]
    pub max_trainers: Option<u32>,
    /// Maximum number of a tenant's fine-tuning jobs that wait or run; more are answered 429
    #[arg(long, value_name = "N")]
    pub tenant_jobs: usize,
    /// Steps between two checkpoints of a fine-tuning job, from which it resumes when a process or a host is
    /// lost
    #[arg(long, value_name = "N")]
    pub checkpoint_steps: u32,
    /// Maximum size of one file of training data
    #[arg(long, value_name = "N")]
    pub max_training_file_bytes: ByteCount,
    /// Maximum total size of one tenant's training files
    #[arg(long, value_name = "N")]
    pub tenant_training_bytes: ByteCount,
    /// Maximum total size of one tenant's Tinker training states; further ones are refused
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
