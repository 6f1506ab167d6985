//! Addresses, TLS and socket options for connections between hosts.
//!
//! # Layout
//!
//! - [`address`]: network addresses in the form HOST:PORT.
//! - [`client`]: TLS 1.3 towards an executor: trusted authorities and the client's certificate.
//! - [`socket`]: socket options that send at once and detect vanished peers.

#![forbid(unsafe_code)]

pub mod address;
pub mod keys;
pub mod socket;
pub mod tls_client;
