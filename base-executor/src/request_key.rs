//! The key of a request: a gateway's connection, and the request's id on that connection.

use shmproto::message::RequestId;

/// A gateway's connection. Numbers are never reused, so a reconnected gateway gets another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// A gateway's connection and the request's id on that connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestKey {
    pub connection: ConnectionId,
    pub request: RequestId,
}
