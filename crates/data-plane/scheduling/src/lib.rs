//! Decisions without side effects.
//!
//! The functions of this crate read no clock, draw no random number and touch no socket by themselves: the
//! caller passes everything that a decision depends on. Equal input gives an equal decision, in a process, in
//! a test and in a simulation.
//!
//! # Layout
//!
//! - [`admission`]: decides which requests are admitted when more arrive than can be served.
//! - [`batch`]: decides which sequences take part in a step, and with how many tokens.
//! - [`clock`]: the source of time.
//! - [`background_io`]: limits disk use of work that can wait beside foreground reads.
//! - [`fairness`]: decides which tenant's request goes next.
//! - [`perf`]: predicts durations from lines fitted to timings, and decides from the predictions.
//! - [`random`]: random numbers by key and counter.
//! - [`routing`]: chooses the executor of a request.
//! - [`token_bucket`]: limits how much a tenant may have in a minute.

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
