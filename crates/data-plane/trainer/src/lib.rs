//! A split client that trains adapters.
//!
//! Adapters, activations, optimizer and data stay in this process. The layer service computes the base's
//! linear layers, forward and backward, and keeps no state between two calls.
//!
//! # Layout
//!
//! - [`data`]: training data, checked to the last line before training starts, and tokenized with weights.
//! - [`batch_sampler`]: the examples of each step, and the held-out examples.
//! - [`grpo`]: answers of the adapter itself, their rewards and advantages.
//! - [`loss`]: losses over the log-probabilities of tokens, and their gradients.
//! - [`optimizer`], [`schedule`]: AdamW, and the learning rate of each step.
//! - [`adapter`]: new adapters. [`draft`]: draft adapters. [`plan`]: all choices of a job.
//! - [`step`]: one step over the layer service. [`job`]: all steps. [`checkpoint`]: the saved state of a job.
//! - [`session`]: one adapter, trained command by command, as in the Tinker API.
//! - [`peft`]: adapters in PEFT's format.
//! - [`cli`]: the program `holobiont-trainer`.
//!
//! # Principles
//!
//! - Equal data and seeds give equal results, bit for bit: random numbers are drawn by key and counter, sums
//!   have a fixed order, and a job can resume at any step.
//! - Names and conventions are those of libraries that users know: torch's AdamW, transformers' schedules,
//!   Tinker's losses, TRL's and OpenAI's files.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only this program and its tests use the items")]

pub mod adapter;
pub mod batch_sampler;
pub mod checkpoint;
pub mod cli;
pub mod data;
pub mod draft;
pub mod grpo;
pub mod job;
pub mod loss;
pub mod optimizer;
pub mod peft;
pub mod plan;
pub mod schedule;
pub mod session;
pub mod step;
