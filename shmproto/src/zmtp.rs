//! ZeroMQ's wire protocol (ZMTP 3.1), bounded, without sockets, for split clients on other hosts.
//!
//! Both ends are state machines that take bytes and give events. The state machines open no socket and read
//! no clock, so the same code runs over TLS, over a Unix socket, and in tests one byte at a time:
//!
//! ```text
//! socket --read--> space() -> advance(count) -> next_event() until None
//! outgoing() --write--> socket -> sent(count)             handshake and heartbeats, between whole messages
//! put_message(...) --write--> socket                      messages, once the connection is ready
//! ```
//!
//! # Layout
//!
//! - [`ZmtpServer`]: the executor's end, a ROUTER that serves DEALERs. [`ZmtpClient`]: a DEALER.
//! - [`put_message`], [`put_two_frames_head`]: encode messages.
//! - `input`: splits bytes into frames. `greeting`, `command`: handshake and commands. `link`: shared code.
//!
//! # Principles
//!
//! - No memory is allocated for an announced length, but at most twice the number of received bytes.
//! - Every length and count has a limit that is checked when it is announced.
//! - A large frame is read directly into the memory that the caller receives.
//! - An error is final: every later call returns it, and no more bytes are read.

use std::fmt;

mod client;
mod command;
mod greeting;
mod input;
mod link;
mod output;
mod server;

pub use client::{CredentialsError, ZmtpClient};
pub use output::{put_message, put_two_frames_head};
pub use server::{AcceptedMechanisms, ZmtpServer};

/// Limits for data from a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZmtpLimits {
    /// Maximum size of one message frame in bytes.
    pub max_frame_bytes: usize,
    /// Maximum number of frames in one message.
    pub max_frames: usize,
    /// Maximum size of one command in bytes.
    pub max_command_bytes: usize,
    /// Maximum size of the handshake in bytes.
    pub max_handshake_bytes: usize,
}

impl ZmtpLimits {
    /// Allows messages of two frames of `max_frame_bytes`, commands of 1 KiB and a handshake of 4 KiB.
    #[must_use]
    pub fn new(max_frame_bytes: usize) -> Self {
        Self { max_frame_bytes, max_frames: 2, max_command_bytes: 1 << 10, max_handshake_bytes: 4 << 10 }
    }
}

/// Security mechanism by which a client authenticates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
    /// No credentials; the transport authenticates the client.
    Null,
    /// Name and password of the client.
    Plain,
}

/// Credentials that a client sends.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// Name of the user; at most 255 bytes.
    pub username: String,
    /// Password of the user; at most 255 bytes.
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("username", &self.username).finish_non_exhaustive()
    }
}

/// Event that an end decodes from received bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ZmtpEvent {
    /// Login; a server must call [`ZmtpServer::accept`] or [`ZmtpServer::reject`] before it reads more.
    Login(Login),
    /// The connection is ready: messages may be sent and will come.
    Ready(Mechanism),
    /// Refusal at a client, with the server's reason. The connection ends.
    Refused(String),
    /// Answer of the peer to a ping.
    Pong,
    /// Complete message, as its frames.
    Message(Vec<Vec<u8>>),
}

/// Error that ends a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpError {
    /// The first bytes belong to another protocol.
    #[error("the peer does not speak ZMTP: connect a ZeroMQ DEALER")]
    Signature,
    /// The peer's version is too old.
    #[error("the peer speaks ZMTP {0}, and 3.0 or later is needed: use libzmq 4 or later")]
    Version(u8),
    /// The peer's security mechanism is not accepted here.
    #[error(
        "the peer asks for the security mechanism {0:?}, which is not taken here: see how this door authenticates"
    )]
    Mechanism(String),
    /// The peer's socket type is not served here.
    #[error("the peer is a {0:?} socket: connect a DEALER to a ROUTER")]
    SocketType(String),
    /// The flags of a frame are undefined, or contradict each other.
    #[error("a frame has the flags {0:#04x}, which mean nothing: close the connection")]
    Flags(u8),
    /// A frame exceeds its limit.
    #[error("a frame of {bytes} bytes was announced, above {most}: send less at once")]
    FrameTooLong {
        /// Size in bytes that was announced.
        bytes: u64,
        /// Largest accepted size in bytes.
        most: usize,
    },
    /// A message has too many frames.
    #[error("a message has more than {0} frames: close the connection")]
    TooManyFrames(usize),
    /// A command exceeds its limit.
    #[error("a command of {bytes} bytes was announced, above {most}: close the connection")]
    CommandTooLong {
        /// Size in bytes that was announced.
        bytes: u64,
        /// Largest accepted size in bytes.
        most: usize,
    },
    /// The handshake exceeds its limit.
    #[error("the handshake has more than {0} bytes: close the connection")]
    HandshakeTooLong(usize),
    /// The fields of a command do not match its length.
    #[error("the command {0} is malformed: close the connection")]
    Malformed(&'static str),
    /// A command came in a state where it is not allowed.
    #[error("the peer sent the command {0:?} where none such belongs: close the connection")]
    Unexpected(String),
    /// A message came before the connection was ready.
    #[error("the peer sent a message before the handshake was over: close the connection")]
    Early,
    /// The peer reported an error.
    #[error("the peer ends the connection: {0:?}")]
    Peer(String),
    /// The peer pings but does not receive the answers.
    #[error("the peer does not take what it is sent: close the connection")]
    Slow,
    /// The server rejected the client's login.
    #[error("the login was rejected: close the connection")]
    Rejected,
}
