//! Simulates the cache and the scheduler of an executor on a virtual clock.
//!
//! The deciding code is the serving code: `kv_cache` and `scheduling::batch`. A cost model replaces computing
//! and copying. So a day of requests takes seconds, the same seed gives the same bytes, and policies can be
//! compared on equal workloads.
//!
//! # Layout
//!
//! - `random`: random number streams by purpose. [`workload`]: conversations made from a seed, or from a
//!   trace.
//! - [`cost`]: times of steps and copies.
//! - [`engine`]: the executor. The engine's observations become a [`report`], with the help of
//!   [`statistics`]; `chart` draws.
//! - [`fleet`]: several executors behind one gateway.
//! - [`commands`]: commands of the program.
//!
//! # Principles
//!
//! - The simulator makes no decision of the real executor: a policy that wins here is the code that runs
//!   there.
//! - A workload is made before it is run, so a policy only affects the times of its answers.

#![forbid(unsafe_code)]

mod chart;
pub mod commands;
pub mod cost;
pub mod engine;
pub mod fleet;
mod random;
pub mod report;
pub mod statistics;
pub mod workload;
