//! ZeroMQ's wire protocol (ZMTP 3.1), bounded, without sockets: what split clients on other hosts speak.
//!
//! Both ends are machines that are given bytes and say what they mean. They open no socket and read no clock, so the
//! same code runs over TLS, over a Unix socket, and in tests one byte at a time:
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
//! - [`put_message`], [`put_two_frames_head`]: messages as bytes.
//! - `input`: from bytes to frames. `greeting`, `command`: what is said before and between messages. `link`: what both
//!   ends have in common.
//!
//! # Principles
//!
//! - No memory is taken for a length: it grows with the bytes that have come, to twice of them at most.
//! - Every length and count has a limit that is checked when it is announced.
//! - A large frame is read into the memory that it is handed out in.
//! - An error is final: the same is said for ever, and nothing more is read.

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

/// Most that a peer may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZmtpLimits {
    /// Bytes of one frame of a message.
    pub max_frame_bytes: usize,
    /// Frames of one message.
    pub max_frames: usize,
    /// Bytes of one command.
    pub max_command_bytes: usize,
    /// Bytes until the connection is ready.
    pub max_handshake_bytes: usize,
}

impl ZmtpLimits {
    /// Messages of two frames of at most this size; commands of 1 KiB, a handshake of 4 KiB.
    #[must_use]
    pub fn new(max_frame_bytes: usize) -> Self {
        Self { max_frame_bytes, max_frames: 2, max_command_bytes: 1 << 10, max_handshake_bytes: 4 << 10 }
    }
}

/// How a client says who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
    /// It does not; the transport has.
    Null,
    /// With a name and a password.
    Plain,
}

/// What a client says of itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The name; at most 255 bytes.
    pub username: String,
    /// The password; at most 255 bytes.
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("username", &self.username).finish_non_exhaustive()
    }
}

/// What came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ZmtpEvent {
    /// To a server: who it is. To be answered by [`ZmtpServer::accept`] or [`ZmtpServer::reject`] before anything more is read.
    Login(Login),
    /// Messages may be sent, and come from now on.
    Ready(Mechanism),
    /// To a client: the server does not want it, and says why. The connection ends.
    Refused(String),
    /// The peer answers a ping.
    Pong,
    /// A message, as its frames.
    Message(Vec<Vec<u8>>),
}

/// Why a connection ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpError {
    /// The first bytes are another protocol's.
    #[error("the peer does not speak ZMTP: connect a ZeroMQ DEALER")]
    Signature,
    /// An old version.
    #[error("the peer speaks ZMTP {0}, and 3.0 or later is needed: use libzmq 4 or later")]
    Version(u8),
    /// Another mechanism than is taken here.
    #[error(
        "the peer asks for the security mechanism {0:?}, which is not taken here: see how this door authenticates"
    )]
    Mechanism(String),
    /// Not the kind of socket that is served here.
    #[error("the peer is a {0:?} socket: connect a DEALER to a ROUTER")]
    SocketType(String),
    /// Bits of a frame's flags that mean nothing, or not together.
    #[error("a frame has the flags {0:#04x}, which mean nothing: close the connection")]
    Flags(u8),
    /// A frame is too long.
    #[error("a frame of {bytes} bytes was announced, above {most}: send less at once")]
    FrameTooLong {
        /// What was announced.
        bytes: u64,
        /// What is taken.
        most: usize,
    },
    /// A message has too many frames.
    #[error("a message has more than {0} frames: close the connection")]
    TooManyFrames(usize),
    /// A command is too long.
    #[error("a command of {bytes} bytes was announced, above {most}: close the connection")]
    CommandTooLong {
        /// What was announced.
        bytes: u64,
        /// What is taken.
        most: usize,
    },
    /// The handshake is too long.
    #[error("the handshake has more than {0} bytes: close the connection")]
    HandshakeTooLong(usize),
    /// A command's fields do not fill its bytes.
    #[error("the command {0} is malformed: close the connection")]
    Malformed(&'static str),
    /// A command that does not belong here.
    #[error("the peer sent the command {0:?} where none such belongs: close the connection")]
    Unexpected(String),
    /// A message before the connection is ready.
    #[error("the peer sent a message before the handshake was over: close the connection")]
    Early,
    /// The peer reports an error.
    #[error("the peer ends the connection: {0:?}")]
    Peer(String),
    /// The peer pings and does not take the answers.
    #[error("the peer does not take what it is sent: close the connection")]
    Slow,
    /// The server rejected the client.
    #[error("the login was rejected: close the connection")]
    Rejected,
}
