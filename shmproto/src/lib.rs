//! Everything that crosses a process boundary is defined here, and nowhere else.
//!
//! # Layout
//!
//! - [`codec`]: fixed-order little-endian encoding with every length bounded before it is trusted.
//! - [`message`]: what gateway and base-executor say to each other over ZeroMQ.
//! - [`region`]: sealed shared memory, named by nothing but its descriptor.
//! - [`image`]: an adapter as a sealed region.
//! - [`handover`]: how a worker is given regions over a Unix socket.
//! - [`board`]: jobs of the executor for its workers, one to many.
//!
//! # Principles
//!
//! - No self-describing format: a message is its fields in order, so there is nothing to confuse.
//! - The type is checked before the body is decoded; trailing bytes are an error.
//! - Lengths are checked against the bytes that are really there *before* anything is allocated.

mod atomic;
pub mod board;
pub mod codec;
mod futex;
pub mod handover;
pub mod image;
pub mod message;
pub mod region;
