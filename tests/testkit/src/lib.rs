//! Tools that tests and benches of all crates share.
//!
//! - [`paths`]: golden files, the real model and the example adapters.
//! - [`servers`]: PostgreSQL, S3 and a hub, each started for one test.
//! - `timeouts`: [`eventually`] waits for a condition, [`watched`] reports a test that hangs.

#![forbid(unsafe_code)]

pub mod paths;
pub mod servers;
mod timeouts;

pub use timeouts::{WATCHDOG, eventually, eventually_some, step, watched, watched_or};
