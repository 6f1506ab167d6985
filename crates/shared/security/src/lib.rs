//! Authentication and connections between hosts: API keys, TLS 1.3, addresses and sockets.
//!
//! # Layout
//!
//! - [`keys`]: the file of hashed API keys.
//! - [`address`]: network addresses in the form HOST:PORT.
//! - [`tls_client`]: TLS 1.3 towards an executor: trusted authorities and the client's certificate.
//! - [`socket`]: socket options that send at once and detect vanished peers.

#![forbid(unsafe_code)]

pub mod address;
pub mod keys;
pub mod socket;
pub mod tls_client;
