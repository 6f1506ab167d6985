//! The base-executor at its public interfaces: over a forward pass without weights, and as a process with a
//! tiny model.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, which is what is wanted")]

mod bridge;
mod capacity;
mod check;
mod cold_start;
mod common;
mod control_group;
mod device_group;
mod drafts;
mod engine;
mod gateway;
mod hostile_workers;
mod kinds;
mod layers_process;
mod oracle_drafter;
mod process;
mod service;
mod streamed;
mod streamed_drafts;
mod tiny;
mod worker;
mod worker_sums;
