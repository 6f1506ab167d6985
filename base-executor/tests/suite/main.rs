//! The base-executor at its public doors: over a forward pass without weights, and as a process with a tiny model.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, which is what is wanted")]

mod assist;
mod bridge;
mod check;
mod cold;
mod common;
mod drafts;
mod engine;
mod gateway;
mod hostile_workers;
mod layers_process;
mod process;
mod service;
mod streamed;
mod tiny;
mod worker;
