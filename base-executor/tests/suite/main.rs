//! The base-executor at its public doors, over a forward pass without weights.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, which is what is wanted")]

mod common;
mod engine;
mod service;
