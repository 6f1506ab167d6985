//! What processes of different hosts need to meet.
//!
//! # Layout
//!
//! - [`address`]: HOST:PORT, as people write it.
//! - [`client`]: TLS 1.3 towards an executor: whom to trust, and who one is.
//! - [`socket`]: options of connections, so that peers that vanish are noticed.

#![forbid(unsafe_code)]

pub mod address;
pub mod client;
pub mod socket;
