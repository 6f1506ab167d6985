//! The command line: every flag, its default and its environment variable.

use std::{net::SocketAddr, path::PathBuf};

use clap::Parser;

use super::settings::{LogFormat, StartAdapter};

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
    pub figures: FigureArgs,
    /// Most sequences under way at once; more are answered with 429
    #[arg(long, env = "HOLOBIONT_MAX_SEQUENCES", value_name = "N", default_value_t = 4096)]
    pub max_sequences: usize,
    /// Milliseconds that running requests get to end after SIGTERM
    #[arg(long, env = "HOLOBIONT_GRACE_MS", value_name = "N", default_value_t = 10_000)]
    pub grace_ms: u64,
    /// Milliseconds after which an executor that owes an answer and is silent counts as lost
    #[arg(long, env = "HOLOBIONT_SILENCE_MS", value_name = "N", default_value_t = 30_000)]
    pub silence_ms: u64,
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

/// Settings about adapters.
#[derive(Debug, Clone, clap::Args)]
pub struct AdapterArgs {
    /// An adapter to load at start; may be given many times
    #[arg(long = "adapter", value_name = "NAME=DIR", value_parser = start_adapter)]
    pub start_adapters: Vec<StartAdapter>,
    /// Adapters loaded over HTTP must be in here
    #[arg(long, env = "HOLOBIONT_ADAPTER_ROOT", value_name = "DIR", default_value = ".")]
    pub adapter_root: PathBuf,
    /// Most adapters the registry holds
    #[arg(long, env = "HOLOBIONT_MAX_ADAPTERS", value_name = "N", default_value_t = 10_000)]
    pub max_adapters: usize,
    /// Longest file of an adapter
    #[arg(long, env = "HOLOBIONT_MAX_ADAPTER_FILE_BYTES", value_name = "N", default_value_t = 2 << 30)]
    pub max_adapter_file_bytes: u64,
}

/// Settings about who may ask, and how often.
#[derive(Debug, Clone, clap::Args)]
pub struct CallerArgs {
    /// File of hashed API keys, kept by 'holobiont key' [default: $CREDENTIALS_DIRECTORY/api-keys if there is
    /// one, otherwise no key is asked for]
    #[arg(long, env = "HOLOBIONT_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Serve without keys beyond loopback and under any host name: whoever reaches the port is an administrator
    #[arg(long, env = "HOLOBIONT_INSECURE")]
    pub insecure: bool,
    /// Most requests a minute for each key that has no limit of its own; 0 is no limit
    #[arg(long, env = "HOLOBIONT_REQUESTS_PER_MIN_PER_KEY", value_name = "N", default_value_t = 0)]
    pub requests_per_min_per_key: u32,
    /// Most requests a minute for each adapter; 0 is no limit
    #[arg(long, env = "HOLOBIONT_REQUESTS_PER_MIN_PER_ADAPTER", value_name = "N", default_value_t = 0)]
    pub requests_per_min_per_adapter: u32,
    /// Web pages of these origins may ask from a browser: 'https://a.example,https://b.example' [default: none]
    #[arg(long, env = "HOLOBIONT_CORS_ORIGINS", value_name = "A,B", value_delimiter = ',')]
    pub cors_origins: Vec<String>,
}

/// Settings about connections.
#[derive(Debug, Clone, clap::Args)]
pub struct ConnectionArgs {
    /// Longest body of a request
    #[arg(long, env = "HOLOBIONT_MAX_BODY_BYTES", value_name = "N", default_value_t = 8 << 20)]
    pub max_body_bytes: usize,
    /// Most open connections; more are answered with 503
    #[arg(long, env = "HOLOBIONT_MAX_CONNECTIONS", value_name = "N", default_value_t = 1024)]
    pub max_connections: usize,
    /// Milliseconds within which a request's header must come, and after which an idle connection is closed
    #[arg(long, env = "HOLOBIONT_HEADER_TIMEOUT_MS", value_name = "N", default_value_t = 10_000)]
    pub header_timeout_ms: u64,
    /// Milliseconds within which a request's body must come
    #[arg(long, env = "HOLOBIONT_BODY_TIMEOUT_MS", value_name = "N", default_value_t = 30_000)]
    pub body_timeout_ms: u64,
    /// Milliseconds after which a reader that takes nothing is cut off and its request cancelled
    #[arg(long, env = "HOLOBIONT_STALL_TIMEOUT_MS", value_name = "N", default_value_t = 60_000)]
    pub stall_timeout_ms: u64,
}

/// Settings about figures and traces.
#[derive(Debug, Clone, clap::Args)]
pub struct FigureArgs {
    /// Write vLLM's metric names beside our own
    #[arg(long, env = "HOLOBIONT_VLLM_METRICS")]
    pub vllm_metrics: bool,
    /// Most adapters with metrics of their own; the others share the label 'other'
    #[arg(long, env = "HOLOBIONT_MAX_ADAPTER_LABELS", value_name = "N", default_value_t = 64)]
    pub max_adapter_labels: usize,
    /// Workers that there should be beside the executor; fewer are shown as missing
    #[arg(long, env = "HOLOBIONT_EXPECTED_WORKERS", value_name = "N", default_value_t = 0)]
    pub expected_workers: u32,
    /// Send traces to this OpenTelemetry collector (OTLP over HTTP)
    #[cfg(feature = "otel")]
    #[arg(long, env = "HOLOBIONT_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}

fn start_adapter(text: &str) -> Result<StartAdapter, String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(StartAdapter { name: name.to_owned(), path: PathBuf::from(path) })
        }
        _ => Err("expected NAME=DIR".to_owned()),
    }
}
