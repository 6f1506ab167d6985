//! The cache and the scheduler of an executor, on a virtual clock.
//!
//! What decides is what serves: `cache` and `scheduling::batch`. What computes and what copies is a cost model. So a day of requests takes
//! seconds, the same seed gives the same bytes, and policies can be compared on equal workloads.
//!
//! # Layout
//!
//! - `random`: streams of numbers by purpose. [`workload`]: conversations made from a seed, or from a trace.
//! - [`cost`]: what steps and copies take.
//! - [`engine`]: the executor. What it wrote down becomes a [`report`], with the help of [`statistics`]; `chart` draws.
//! - [`fleet`]: several executors behind one gateway.
//! - [`commands`]: what the program can do.
//!
//! # Principles
//!
//! - Nothing here decides what the real executor decides: a policy that wins here is the code that runs there.
//! - A workload is made before it is run, so that what a policy does changes nothing of it but when answers come.

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
