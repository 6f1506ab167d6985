//! Split clients over an executor in the same process: every mode of masking, every method of generation, and
//! training.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agreement;
mod command;
mod drafts;
mod exact_drafts;
#[path = "../attacks/executor.rs"]
#[allow(dead_code, reason = "a part is for the attacks")]
mod executor;
mod masking;
mod pads;
mod ring;
mod secrets;
mod session;
mod split;
#[path = "../support/mod.rs"]
mod support;
mod training;
mod transports;
