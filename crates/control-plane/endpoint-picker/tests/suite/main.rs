//! The picker with hostile, slow and silent hosts and clients, and behind its certificate.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod hosts;
mod tls;
