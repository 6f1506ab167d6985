//! Decisions without side effects.
//!
//! Nothing here reads a clock, draws a number or touches a socket by itself: what a decision depends on is handed in, and
//! the same things handed in give the same decision, in a process, in a test and in a simulation.
//!
//! # Layout
//!
//! - [`admission`]: who is let in when more ask than can be served.
//! - [`batch`]: who takes part in a step, with how many tokens.
//! - [`clock`]: where the time comes from.
//! - [`background_io`]: what may be taken of a disk beside whoever comes first there.
//! - [`fairness`]: whose turn it is, of tenants who share what there is.
//! - [`perf`]: what things will take: lines fitted to timings, and what follows from them.
//! - [`random`]: numbers drawn by key and counter.
//! - [`routing`]: which executor a request goes to.
//! - [`token_bucket`]: how much somebody may have in a minute.

#![forbid(unsafe_code)]

pub mod admission;
pub mod background_io;
pub mod batch;
pub mod clock;
pub mod fairness;
pub mod perf;
pub mod random;
pub mod routing;
pub mod token_bucket;
