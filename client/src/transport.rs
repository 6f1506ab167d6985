//! One connection to an executor, whatever carries it.
//!
//! # Layout
//!
//! - this file: what every transport does, and what is checked of every reply
//! - [`local`]: shared memory, beside a control socket
//! - [`remote`]: ZeroMQ messages over a stream: TLS or a private Unix socket
//! - [`tls`]: certificates, and the handshake
//! - [`loopback`]: an executor in this process, for tests and examples
//!
//! A transport does one thing at a time and never repeats anything: what a failure means is for the
//! [session](crate::session) to decide.

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

/// A connection. After an error it is of no use any more.
pub trait Transport: Send + fmt::Debug {
    /// Sends a control message and gives the answer to it. An answer that refuses is an answer.
    ///
    /// # Errors
    /// The connection is lost, or the peer breaks the protocol.
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError>;

    /// Sends a control message that is not answered, if that is possible.
    fn send_oneway(&mut self, message: &ToLayers);

    /// Sends the rows of a call and waits for its reply, which is the call's own; writes `out` if it is
    /// [`CallStatus::Done`](shmproto::layer::CallStatus::Done).
    ///
    /// # Errors
    /// The connection is lost, or the peer breaks the protocol.
    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError>;

    /// As [`call`](Self::call), and does something else, once, `meanwhile`: where the transport can, while the executor computes.
    ///
    /// # Errors
    /// As [`call`](Self::call).
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

/// Whoever can make connections to one executor, or to its successor at the same address.
pub trait Connect: Send + Sync + fmt::Debug {
    /// Makes a connection.
    ///
    /// # Errors
    /// Nobody is there, or does not want this client.
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError>;

    /// Whether the executor computes on another machine, so that this one has nothing to do while a call is on its way.
    fn is_far(&self) -> bool {
        true
    }

    /// Hash of the shared layout, for [`shmproto::layer::control::SessionOpen`]; 0 if memory is not shared.
    fn layout_hash(&self) -> u64 {
        0
    }
}

/// Whoever else has it, too.
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
/// It answers another call, or with another shape.
pub fn check_reply(call: &CallHeader, reply: &ReplyHeader) -> Result<(), LinkError> {
    let wrong = |what: &str, found: u64, wanted: u64| {
        Err(LinkError::Protocol(format!("a reply has {what} {found} where {wanted} was expected")))
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
