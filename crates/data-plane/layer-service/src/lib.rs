//! The layer service: single linear groups of the base, for split clients on this host and others.
//!
//! A client runs the model's pass itself and sends the rows that a linear group takes; the executor sends back what the
//! group makes of them, and keeps nothing. Calls that ask for the same are computed together: with each other, and with the
//! resident engine's own pass when it comes by.
//!
//! # Layout
//!
//! - [`settings`]: what the service holds itself to.
//! - [`registry`]: sessions and what tenants may hold; in front of the hub, asked from the doors' threads.
//! - [`event_queue`]: what the doors tell the hub, and how it answers a remote door.
//! - [`dispatcher`]: the compute thread's side: takes calls in, checks them, computes what is due, answers.
//! - [`batcher`], [`call_queue`], [`batching_policy`]: which calls are computed next; pure, with the time as an argument. `sweep_order`: where, of
//!   a base that comes from a disk.
//! - `slab_charge`: what a channel takes of a tenant's memory.
//! - [`quota`]: rows that a tenant has waiting, and rows a second.
//! - [`session`]: one session as the hub knows it; what it has used.
//! - `stats`: what the operator is told.
//! - [`base_files`]: what a client must know of the base.
//! - [`local`]: the door for clients of this host.
//! - [`remote`]: the door for clients that speak ZeroMQ, over [`tls`] or a private socket.
//! - [`start`]: from the settings to open doors.
//! - [`auth`]: who a client is, from a key or a certificate.
//! - `wire_dtype`: how rows travel.
//!
//! # Invariants
//!
//! - A call that was taken in is answered exactly once, unless its session ends first or repeats its number.
//! - Nothing a client sends, or fails to take, delays another by more than one batch of [`settings::Batching::chunk_rows`].
//! - What a call's rows come to depends on the weights and on the row alone: no setting here changes an answer.

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

/// A connection of a client. Never used again: a session that is taken over after a lost connection has a new one, and
/// keeps its [`SessionId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// A session, as its client calls it. Never used again for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// Whose session it is, as the authentication says.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(Arc<str>);

impl Tenant {
    /// Those who need no key.
    pub const PUBLIC: &'static str = "public";

    /// The tenant of this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Its name.
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

/// How a client's calls come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SessionTransport {
    /// Through shared memory.
    Channel,
    /// ZeroMQ over the private Unix socket.
    Ipc,
    /// ZeroMQ over TLS.
    Tls,
}

impl SessionTransport {
    /// As operators read it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Channel => "channel",
            Self::Ipc => "ipc",
            Self::Tls => "tls",
        }
    }
}
