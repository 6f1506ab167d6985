//! Everything that crosses a process boundary is defined here, and nowhere else.
//!
//! # Layout
//!
//! - [`codec`]: fixed-order little-endian encoding with every length bounded before it is trusted.
//! - [`message`]: what gateway and base-executor say to each other over ZeroMQ.
//! - [`private_socket`]: where a process listens: a directory that nobody else may enter.
//! - [`region`]: sealed shared memory, named by nothing but its descriptor.
//! - [`image`]: an adapter as a sealed region.
//! - [`fd_passing`]: how a worker is given regions over a Unix socket.
//! - [`board`]: jobs of the executor for its workers, one to many.
//! - [`layer`]: what a split client and the executor say to each other: calls, replies, control messages.
//! - [`channel`]: how calls travel on one host: two rings and a slab in one region.
//! - [`remote_executor`]: what a gateway asks of an executor on another host, before it drives it.
//! - [`zmtp`]: how they travel between hosts: ZeroMQ's wire protocol, bounded, without sockets.
//! - [`file`]: regular files that others may write, mapped read-only.
//! - [`notify`]: what a process tells systemd, or `holobiont up`.
//! - `cache_line`, `memory`, `atomic`, `futex`: what regions are made of.
//!
//! # Principles
//!
//! - No self-describing format: a message is its fields in order, so there is nothing to confuse.
//! - The type is checked before the body is decoded; trailing bytes are an error.
//! - Lengths are checked against the bytes that are really there *before* anything is allocated.

mod atomic;
pub mod board;
mod cache_line;
pub mod channel;
pub mod codec;
pub mod fd_passing;
pub mod file;
mod futex;
pub mod image;
pub mod layer;
mod memory;
pub mod message;
pub mod notify;
pub mod private_socket;
pub mod region;
pub mod remote_executor;
pub mod zmtp;
