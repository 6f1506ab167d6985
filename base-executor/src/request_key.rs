//! Who asks: a connection, and the name it gave to its request.

use shmproto::message::RequestId;

/// A gateway's connection. Never used again, so a gateway that comes back is never taken for the old one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// Who asked: a connection and the name it gave to its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestKey {
    /// The connection.
    pub connection: ConnectionId,
    /// The connection's name for the request.
    pub request: RequestId,
}
