//! A worker process that computes adapter deltas on one core, through shared memory.
//!
//! The worker owns its core and read-only maps of adapters, and makes no decisions. The executor posts slices
//! on a board. The worker claims a slice, sums the slice's ranks with the executor's kernels, and publishes
//! the sums in memory that only it may write. The worker may be killed, stopped and restarted at any time;
//! the executor takes claimed slices back.
//!
//! # Layout
//!
//! - [`config`]: the settings.
//! - `control`: the thread that finds the executor, asks for a worker slot and maps adapters.
//! - `library`: the mapped adapters, and their handoff to the compute thread.
//! - `assignment`: a worker slot and its connection, passed to the compute thread.
//! - `compute`: the thread that computes slices.
//! - `signals`: the thread that ends the process and reports to systemd.
//! - `thread_status`: status that the threads share. `systemd`: notifications to systemd.
//! - `confine`: the seccomp filter of each thread.
//! - `pinning`: the core of the process.
//! - `failpoints`: names for tests with failures.
//!
//! # Threads
//!
//! ```text
//! control --posts (a slot each), handoff (adapters)--> compute --closes the connection if fenced--> control
//! watch   --ends the process, whether the others sleep or compute
//! ```
//!
//! The compute thread waits only for the board.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only this program and its tests use the items")]

mod assignment;
mod compute;
pub mod config;
mod confine;
mod control;
mod failpoints;
mod library;
mod pinning;
mod signals;
mod systemd;
mod thread_status;

pub use self::failpoints::FAILPOINTS;

use std::sync::mpsc;

use self::{
    config::WorkerConfig,
    confine::{Thread, confine},
    control::Control,
    signals::ParentWatch,
    thread_status::ThreadStatus,
};

// Tests count allocations where none are allowed.
#[cfg(test)]
#[global_allocator]
static COUNTING: assert_no_alloc::AllocDisabler = assert_no_alloc::AllocDisabler;

/// Runs the process until a signal ends it.
///
/// # Errors
/// If the process cannot start or continue. A signal ends the process with exit code 0 and does not return.
pub fn run(config: &WorkerConfig) -> anyhow::Result<()> {
    static SIGNS: ThreadStatus = ThreadStatus::new();
    process::start_log(config.log_format);
    process::raise_file_limit();
    pinning::stay_on(config.core)?;
    let lifeline = if config.exit_with_stdin { ParentWatch::Stdin } else { ParentWatch::None };
    signals::start(&SIGNS, lifeline)?;
    // Capacity one: a new slot may arrive before the compute thread has left the previous one.
    let (sender, posts) = mpsc::sync_channel(1);
    Control::new(config, &SIGNS, sender).start()?;
    systemd::ready();
    confine(Thread::Compute);
    match compute::run(&posts, config.spin(), &SIGNS) {
        Some(why) => Err(why.into()),
        None => Ok(()),
    }
}
