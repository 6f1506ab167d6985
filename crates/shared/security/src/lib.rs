//! Who may connect, and how: API keys, TLS 1.3, addresses and sockets.
//!
//! # Layout
//!
//! - [`keys`]: the file of hashed API keys.
//! - [`address`]: HOST:PORT, as people write it.
//! - [`tls_client`]: TLS 1.3 towards an executor: trusted roots and the client's own certificate.
//! - [`socket`]: options of connections, so that a vanished peer is noticed.

#![forbid(unsafe_code)]

pub mod address;
pub mod keys;
pub mod socket;
pub mod tls_client;
