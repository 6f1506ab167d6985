//! One connection to an executor, over any medium.
//!
//! # Layout
//!
//! - this file: the traits of transports, and the checks of every reply
//! - [`local`]: shared memory, beside a control socket
//! - [`remote`]: ZeroMQ messages over a stream: TLS or a private Unix socket
//! - [`tls`]: certificates, and the handshake
//! - [`loopback`]: an executor in this process, for tests and examples
//!
//! A transport does one thing at a time and never retries; the [session](crate::session) handles failures.

pub mod local;
pub mod loopback;
pub mod remote;
pub mod tls;

use std::{fmt, sync::Arc};

use shmproto::layer::{
    CallHeader, CallStatus, ReplyHeader,
    control::{FromLayers, ToLayers},
};

use crate::error::LinkError;

/// A connection, which cannot be used any more after an error.
pub trait Transport: Send + fmt::Debug {
    /// Sends a control message and returns its answer. A refusal is an answer too.
    ///
    /// # Errors
    /// Fails if the connection is lost, or the peer breaks the protocol.
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError>;

    /// Sends a control message without an answer, if possible.
    fn send_oneway(&mut self, message: &ToLayers);

    /// Sends the rows of a call and waits for the reply to this call. Writes `out` if the reply is
    /// [`CallStatus::Done`](shmproto::layer::CallStatus::Done).
    ///
    /// # Errors
    /// Fails if the connection is lost, or the peer breaks the protocol.
    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError>;

    /// Like [`call`](Self::call), and calls `meanwhile` once, if possible while the executor computes.
    ///
    /// # Errors
    /// Fails as [`call`](Self::call) does.
    fn call_beside(
        &mut self,
        call: &CallHeader,
        x: &[f32],
        out: &mut [f32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<ReplyHeader, LinkError> {
        meanwhile();
        self.call(call, x, out)
    }
}

/// Connector to one executor, or to its successor at the same address.
pub trait Connect: Send + Sync + fmt::Debug {
    /// Makes a connection to the executor.
    ///
    /// # Errors
    /// Fails if the executor is unreachable, or refuses this client.
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError>;

    /// Whether the executor computes on another machine, so that this one is idle during a call.
    fn is_far(&self) -> bool {
        true
    }

    /// Returns the hash of the layout, for [`shmproto::layer::control::SessionOpen`]; 0 if nothing is shared.
    fn layout_hash(&self) -> u64 {
        0
    }
}

/// A shared connector connects as its target does.
impl Connect for Arc<dyn Connect> {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        (**self).connect()
    }

    fn is_far(&self) -> bool {
        (**self).is_far()
    }

    fn layout_hash(&self) -> u64 {
        (**self).layout_hash()
    }
}

/// Checks that `reply` is an answer to `call`.
///
/// # Errors
/// Fails if the reply belongs to another call, or has another shape.
pub fn check_reply(call: &CallHeader, reply: &ReplyHeader) -> Result<(), LinkError> {
    let wrong = |what: &str, found: u64, wanted: u64| {
        Err(LinkError::Protocol(format!("a reply has {what} {found} instead of {wanted}")))
    };
    let rows = if reply.status == CallStatus::Done { call.rows } else { 0 };
    if reply.sequence != call.sequence {
        wrong("the number", reply.sequence, call.sequence)
    } else if reply.rows != rows {
        wrong("rows", reply.rows.into(), rows.into())
    } else if reply.dtype != call.dtype {
        wrong("the number format", reply.dtype as u64, call.dtype as u64)
    } else {
        Ok(())
    }
}
