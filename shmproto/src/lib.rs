//! Definitions of all data that crosses a process boundary, in this one crate.
//!
//! # Layout
//!
//! - [`codec`]: fixed-order little-endian encoding in which every length is bounded before it is trusted.
//! - [`message`]: messages between gateway and base-executor over ZeroMQ.
//! - [`private_socket`]: listens in a directory that only one user may enter.
//! - [`region`]: sealed shared memory, named by nothing but its descriptor.
//! - [`image`]: an adapter as a sealed region.
//! - [`fd_passing`]: passes regions to workers over a Unix socket.
//! - [`board`]: jobs of the executor for its workers, one to many.
//! - [`layer`]: messages between a split client and the executor: calls, replies, control messages.
//! - [`channel`]: carries calls on one host through two rings and a slab in one region.
//! - [`group`]: calls of an executor to the other processes of its device group.
//! - [`remote_executor`]: requests of a gateway to an executor on another host, before the tunnel.
//! - [`zmtp`]: carries calls between hosts by ZeroMQ's wire protocol, bounded, without sockets.
//! - [`file`]: read-only maps of regular files that other processes may write.
//! - `cache_line`, `memory`, `atomic`, `futex`: parts of which regions are built.
//!
//! # Principles
//!
//! - No format describes itself: a message is its fields in order, so no field can be confused with another.
//! - The type is checked before the body is decoded; trailing bytes are an error.
//! - Lengths are checked against the bytes that really exist *before* memory is allocated.

mod atomic;
pub mod board;
mod cache_line;
pub mod channel;
pub mod codec;
pub mod fd_passing;
pub mod file;
mod futex;
pub mod group;
pub mod image;
pub mod layer;
mod memory;
pub mod message;
pub mod private_socket;
pub mod region;
pub mod remote_executor;
pub mod zmtp;
