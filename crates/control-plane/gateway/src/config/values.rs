//! Settings that other modules receive, each a type of its own with its defaults.

use std::{path::PathBuf, time::Duration};

use security::address::HostPort;
use settings::{ReasoningParser, ToolCallParser};

use crate::{limits::RequestsPerMinute, tenant_memory::MemoryLimits};

/// Event that shuts the process down, beside SIGTERM and SIGINT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownTrigger {
    /// The end of standard input.
    Stdin,
    Signals,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartAdapter {
    pub name: String,
    pub path: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedEndpoint {
    pub name: String,
    pub place: ExecutorEndpoint,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecutorEndpoint {
    Socket(PathBuf),
    /// Address of the TLS listener on another host.
    Host(HostPort),
}

/// Sockets of KV events, as ZeroMQ addresses to bind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsConfig {
    pub endpoint: String,
    pub replay_endpoint: Option<String>,
    pub topic: String,
}

/// Host names under which a gateway without keys answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllowedHosts {
    /// Names of this machine only. A web page that resolves its own name to this address is refused (DNS
    /// rebinding).
    Local,
    /// Any host name (`--insecure`).
    Any,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Limit of each key without a limit of its own; `GatewayConfig::keys` has it already.
    pub per_key: RequestsPerMinute,
    pub per_adapter: RequestsPerMinute,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub max_body_bytes: usize,
    /// Memory for what requests keep.
    pub memory: MemoryLimits,
    pub max_connections: usize,
    /// Timeout of a request's header, and of an idle connection.
    pub header_timeout: Duration,
    pub body_timeout: Duration,
    /// Timeout of a client that reads nothing.
    pub stall_timeout: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Maximum number of a tenant's batches that wait or run.
    pub tenant_batches: usize,
    /// Time from the creation of a batch until its remaining lines expire; OpenAI's API knows only 24 hours.
    pub window: Duration,
}

/// Limits of fine-tuning, and the socket of the trainer service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainingLimits {
    /// Socket of the trainer service; without it there is no training.
    pub trainer_socket: Option<PathBuf>,
    /// Maximum number of a tenant's jobs that wait or run.
    pub tenant_jobs: usize,
    pub checkpoint_steps: u32,
    pub max_file_bytes: u64,
    pub tenant_bytes: u64,
    /// Bytes of a tenant's saved states above which no further states are kept.
    pub tenant_state_bytes: u64,
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self { tenant_batches: 16, window: Duration::from_secs(24 * 60 * 60) }
    }
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            max_body_bytes: 8 << 20,
            memory: MemoryLimits::default(),
            max_connections: 1024,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(60),
        }
    }
}

impl Default for TrainingLimits {
    fn default() -> Self {
        Self {
            trainer_socket: None,
            tenant_jobs: 16,
            checkpoint_steps: 50,
            max_file_bytes: 512 << 20,
            tenant_bytes: 4 << 30,
            tenant_state_bytes: 16 << 30,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct OutputParsers {
    pub calls: ToolCallParser,
    pub reasoning: ReasoningParser,
}
