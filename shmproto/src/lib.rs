//! Everything that crosses a process boundary is defined here, and nowhere else.
//!
//! # Layout
//!
//! - [`codec`]: fixed-order little-endian encoding with every length bounded before it is trusted.
//! - [`message`]: what gateway and base-executor say to each other over ZeroMQ.
//!
//! # Principles
//!
//! - No self-describing format: a message is its fields in order, so there is nothing to confuse.
//! - The type is checked before the body is decoded; trailing bytes are an error.
//! - Lengths are checked against the bytes that are really there *before* anything is allocated.

#![forbid(unsafe_code)]

pub mod codec;
pub mod message;
