//! The settings that other rooms are handed: each a value of its own, with what holds if nobody says otherwise.

use std::{path::PathBuf, time::Duration};

use security::address::HostPort;
use settings::{ReasoningParser, ToolCallParser};

use crate::{limits::RequestsPerMinute, tenant_memory::MemoryLimits};

/// What ends the process, beside SIGTERM and SIGINT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownTrigger {
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

/// An executor, as it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedEndpoint {
    /// What it is called.
    pub name: String,
    /// Where it is.
    pub place: ExecutorEndpoint,
}

/// Where an executor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecutorEndpoint {
    /// Its ipc socket.
    Socket(PathBuf),
    /// The TLS door of another host.
    Host(HostPort),
}

/// Under which host names a gateway without keys answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllowedHosts {
    /// Those of this machine: a web page elsewhere that points its own name at us is refused (DNS rebinding).
    Local,
    /// Any (`--insecure`).
    Any,
}

/// How often callers may ask.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// For each key that has no limit of its own; `GatewayConfig::keys` knows it already.
    pub per_key: RequestsPerMinute,
    /// For each adapter.
    pub per_adapter: RequestsPerMinute,
}

/// What connections may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Longest body of a request.
    pub max_body_bytes: usize,
    /// Memory for what requests keep.
    pub memory: MemoryLimits,
    /// Most open connections.
    pub max_connections: usize,
    /// Within this a request's header must come; also how long a connection may be idle.
    pub header_timeout: Duration,
    /// Within this a request's body must come.
    pub body_timeout: Duration,
    /// How long a reader may take nothing.
    pub stall_timeout: Duration,
}

/// What fine-tuning may cost, and who does it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainingLimits {
    /// Where trainers are asked for; without it nothing is trained.
    pub trainer_socket: Option<PathBuf>,
    /// Most jobs of a tenant that wait or are under way.
    pub tenant_jobs: usize,
    /// Steps of a job between two checkpoints.
    pub checkpoint_steps: u32,
    /// Longest file of training data.
    pub max_file_bytes: u64,
    /// Most bytes of a tenant's files of training data.
    pub tenant_bytes: u64,
    /// No more states are kept for a tenant whose states take so many bytes.
    pub tenant_state_bytes: u64,
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

/// How a model writes what is no plain text.
#[derive(Debug, Clone, Copy)]
pub struct OutputParsers {
    /// Calls of tools.
    pub calls: ToolCallParser,
    /// What stands around its thoughts.
    pub reasoning: ReasoningParser,
}
