//! The layer service: single linear groups of the base, for split clients on this host and others.
//!
//! A client runs the forward pass itself and sends the input rows of a linear group. The executor returns the
//! output rows and keeps no state. Calls for the same computation are batched, with each other and with the
//! passes of the resident engine.
//!
//! # Layout
//!
//! - [`settings`]: settings and limits of the service
//! - [`registry`]: sessions and quotas, used by the connection threads
//! - [`event_queue`]: queues between the connection threads and the dispatcher
//! - [`dispatcher`]: accepts, checks, batches and answers calls on the compute thread
//! - [`batcher`], [`call_queue`], [`batching_policy`]: the choice of the next calls; the time is an argument
//! - `sweep_order`: the order of layer chunks, for streamed weights
//! - `slab_charge`: memory of a channel in the tenant's quota
//! - [`quota`]: limits of waiting rows and of rows per second
//! - [`session`]: identity and counters of a session
//! - `stats`: stats for the operator
//! - [`base_files`]: catalog and client weights
//! - [`local`]: server for clients on this host
//! - [`remote`]: server for ZeroMQ clients, over [`tls`] or a private socket
//! - [`start`]: starts the service from its settings
//! - [`auth`]: authentication by key or certificate
//! - `wire_dtype`: rows in wire format
//!
//! # Invariants
//!
//! - An accepted call is answered exactly once, unless its session ends first or repeats its number.
//! - No client can delay another by more than one batch of [`settings::Batching::chunk_rows`].
//! - The result of a row depends on the weights and on the row alone: no setting here changes an answer.

#![forbid(unsafe_code)]

pub mod auth;
pub mod base_files;
pub mod batcher;
pub mod batching_policy;
pub mod call_queue;
pub mod dispatcher;
pub mod event_queue;
pub mod local;
pub mod quota;
pub mod registry;
pub mod remote;
pub mod session;
pub mod settings;
mod slab_charge;
pub mod start;
mod stats;
mod sweep_order;
pub mod tls;
mod wire_dtype;

use std::{fmt, sync::Arc};

/// Id of a client's connection, never reused. A session that resumes after a lost connection gets a new one,
/// and keeps its [`SessionId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// Number of a session, as its client knows it; never reused for another session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// Owner of a session, from the authentication.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(Arc<str>);

impl Tenant {
    /// Tenant of all clients where no key is required.
    pub const PUBLIC: &'static str = "public";

    /// Makes the tenant of this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Returns the tenant's name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Transport of a client's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SessionTransport {
    /// Shared memory on this host.
    Channel,
    /// ZeroMQ over the private Unix socket.
    Ipc,
    /// ZeroMQ inside TLS 1.3.
    Tls,
}

impl SessionTransport {
    /// Returns the transport's name for operators.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Channel => "channel",
            Self::Ipc => "ipc",
            Self::Tls => "tls",
        }
    }
}
