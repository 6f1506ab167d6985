//! The picker among hosts and clients that mean harm, are slow or silent, and behind its certificate.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod hosts;
mod tls;
