//! A process that computes adapters' deltas on one core, through shared memory.
//!
//! It owns its core and read-only maps of adapters, and decides nothing. The executor posts slices on a board; this
//! process claims one, sums the ranks it names with the executor's own kernels, puts the sums where only it may write, and
//! says so. It may be killed, stopped and started again at any moment: what it had claimed, the executor takes back.
//!
//! # Layout
//!
//! - [`config`]: the settings.
//! - `control`: the thread that talks to the executor: finds it, asks for a seat, maps adapters.
//! - `library`: the adapters it has mapped, and how they reach the thread that computes.
//! - `assignment`: where that thread is sent: a seat, and what comes with it.
//! - `compute`: the thread that computes.
//! - `signals`: the thread that ends the process, and tells systemd how it is.
//! - `thread_status`: what the threads show each other; `systemd`: the words for it.
//! - `confine`: the system calls each thread gives up.
//! - `process`: core and log.
//! - `failpoints`: where tests may interfere.
//!
//! # Threads
//!
//! ```text
//! control --posts (a seat each), handoff (adapters)--> compute --shuts the connection down when fenced--> control
//! watch   --ends the process, wherever the others are
//! ```
//!
//! The thread that computes waits for nobody but the board.

#![forbid(unsafe_code)]

mod assignment;
mod compute;
pub mod config;
mod confine;
mod control;
mod failpoints;
mod library;
mod process;
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

// Tests count what is allocated where nothing may be.
#[cfg(test)]
#[global_allocator]
static COUNTING: assert_no_alloc::AllocDisabler = assert_no_alloc::AllocDisabler;

/// Runs the process until a signal ends it.
///
/// # Errors
/// If it cannot start, or cannot go on; signals end the process from within, with exit code 0.
pub fn run(config: &WorkerConfig) -> anyhow::Result<()> {
    static SIGNS: ThreadStatus = ThreadStatus::new();
    process::start_log(config.log_format);
    process::allow_many_files();
    process::stay_on(config.core)?;
    let lifeline = if config.exit_with_stdin { ParentWatch::Stdin } else { ParentWatch::None };
    signals::start(&SIGNS, lifeline)?;
    // One: a seat may be there before the thread that computes has left the one before.
    let (sender, posts) = mpsc::sync_channel(1);
    Control::new(config, &SIGNS, sender).start()?;
    systemd::ready();
    confine(Thread::Compute);
    match compute::run(&posts, config.spin(), &SIGNS) {
        Some(why) => Err(why.into()),
        None => Ok(()),
    }
}
