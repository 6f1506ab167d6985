//! End-to-end tests: the real programs, started as people start them, asked over HTTP with a real model, or its first layers.
//!
//! # Layout
//!
//! - [`plan`], [`deployment`]: `holobiont up` as a value: started by a [`DeploymentPlan`], stopped when it is dropped
//! - `cores`: which cores it computes on
//! - [`client`]: the requests the tests make, each with a time limit
//! - [`answer`]: what came back, exact to the last bit of every log-probability
//! - [`stream`]: server-sent events, and the ways in which a stream may end
//! - `state_directory`: the directories it has to itself
//! - [`fixtures`]: programs, model and adapters
//! - [`direct_adapters`]: IA3 adapters and prefixes for that model
//! - [`gpu`]: a small model for tests of a GPU, and whether there is one
//! - [`proc`]: what the operating system says of a process
//! - [`repeats`]: how often what chance decides is repeated
//! - [`watchdog`]: nothing waits for ever
//! - [`tinker`]: training step by step, as the `tinker` package asks for it
//! - [`jobs`]: fine-tuning jobs, as the `openai` package asks for them
//! - [`fleet`]: several hosts behind Envoy and endpoint pickers
//! - [`remote_executor`]: executors of other hosts, and the wires to them
//! - [`network`]: networks of their own for hosts, that can be cut
//! - [`servers`]: the PostgreSQL and the bucket that the hosts of a fleet share
//! - [`split`]: split clients of a deployment: honest ones, the program, and those that mean harm
//! - [`chaos`]: processes that die at named places while golden requests run
//!
//! This is the tests' own arm: whatever goes wrong here panics and says what it was.

#![forbid(unsafe_code)]

pub mod answer;
pub mod chaos;
pub mod client;
mod cores;
pub mod deployment;
pub mod direct_adapters;
pub mod fixtures;
pub mod fleet;
pub mod gpu;
pub mod jobs;
pub mod network;
pub mod plan;
pub mod proc;
pub mod remote_executor;
pub mod repeats;
pub mod split;
mod state_directory;
pub mod stream;
pub mod tinker;
pub mod watchdog;

pub use answer::CompletionAnswer;
pub use client::{Client, CompletionRequest, RequestFault};
pub use deployment::{Deployment, DeploymentProcess};
pub use fixtures::{BASE, EXAMPLES, MODELS};
pub use plan::DeploymentPlan;
pub use proc::SharedMemory;
pub use state_directory::StateDirectory;
pub use stream::{CompletionStream, StreamEnd};
pub use testkit::servers;
pub use watchdog::{WATCHDOG, eventually, eventually_some, signal, watched};
