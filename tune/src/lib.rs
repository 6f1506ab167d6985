//! Training of adapters: the parts that need no model.
//!
//! # Layout
//!
//! - [`data`]: training data as people have it, checked to the last line before anything runs, and turned into tokens with
//!   weights.
//! - [`order`]: which examples a step sees, and which are held out.
//! - [`loss`]: what is wrong with the log-probabilities of tokens, and how much each matters.
//! - [`optimizer`], [`schedule`]: what is done about it.
//!
//! # Principles
//!
//! - The same data and seed give the same training, bit for bit: random numbers are drawn by key and counter, sums have a fixed
//!   order, and any step can be resumed at.
//! - Names and conventions are those of the libraries whose users come here: torch's AdamW, transformers' schedules, Tinker's
//!   losses, TRL's and OpenAI's files.
#![forbid(unsafe_code)]

pub mod data;
pub mod loss;
pub mod optimizer;
pub mod order;
pub mod schedule;
