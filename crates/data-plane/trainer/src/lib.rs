//! A client that learns: adapters, activations, optimizer and data are its own, base layers are rented, forward and
//! backward, and whoever lends them keeps nothing between two calls.
//!
//! # Layout
//!
//! - [`data`]: training data as people have it, checked to the last line before anything runs, and turned into tokens with
//!   weights.
//! - [`batch_sampler`]: which examples a step sees, and which are held out.
//! - [`loss`]: what is wrong with the log-probabilities of tokens, and how much each matters.
//! - [`optimizer`], [`schedule`]: what is done about it.
//! - [`adapter`]: what an adapter begins as. [`draft`]: one that guesses what the base says. [`plan`]: every choice of a job.
//! - [`step`]: one step over a rented base. [`job`]: all of them. [`checkpoint`]: where a job was.
//! - [`session`]: one adapter, trained order by order, as Tinker has it.
//! - [`peft`]: the adapter, as others read it.
//! - [`cli`]: the program `holobiont-trainer`.
//!
//! # Principles
//!
//! - The same data and seed give the same training, bit for bit: random numbers are drawn by key and counter, sums have a fixed
//!   order, and any step can be resumed at.
//! - Names and conventions are those of the libraries whose users come here: torch's AdamW, transformers' schedules, Tinker's
//!   losses, TRL's and OpenAI's files.
#![forbid(unsafe_code)]

pub mod adapter;
pub mod batch_sampler;
pub mod checkpoint;
pub mod cli;
pub mod data;
pub mod draft;
pub mod job;
pub mod loss;
pub mod optimizer;
pub mod peft;
pub mod plan;
pub mod schedule;
pub mod session;
pub mod step;
