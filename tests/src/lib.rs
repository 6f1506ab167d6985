//! End-to-end tests: the real programs, started as users start them, requested over HTTP with a real model,
//! or its first layers.
//!
//! # Layout
//!
//! - [`plan`], [`deployment`]: `holobiont up` as a value: started by a [`DeploymentPlan`], stopped when it is
//!   dropped
//! - `cores`: assignment of cores to deployments
//! - [`client`]: requests of the tests, each with a time limit
//! - [`answer`]: answers, exact to the last bit of every log-probability
//! - [`stream`]: server-sent events, and the ends of a stream
//! - `state_directory`: state directories of deployments
//! - [`fixtures`]: programs, model and adapters
//! - [`direct_adapters`]: IA3 adapters and prefixes for that model
//! - [`gpu`]: a small model for GPU tests, and the check for a device
//! - [`proc`]: process information of the operating system
//! - [`repeats`]: repetition counts of random tests
//! - [`watchdog`]: detection of hanging tests
//! - [`tinker`]: stepwise training through the API of the `tinker` package
//! - [`keys`]: API keys of tenants
//! - [`jobs`]: fine-tuning jobs through the API of the `openai` package
//! - [`fleet`]: several hosts behind Envoy and endpoint pickers
//! - [`remote_executor`]: executors of other hosts, and the links to them
//! - [`network`]: separate networks for hosts, with links that can be cut
//! - [`servers`]: the PostgreSQL and the bucket that the hosts of a fleet share
//! - [`split`]: split clients of a deployment: honest ones, the program, and hostile ones
//! - [`chaos`]: processes that fail at failpoints while golden requests run
//!
//! This crate only serves tests, so every failure panics with a description.

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
pub mod keys;
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
