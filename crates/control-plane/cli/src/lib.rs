//! The command `holobiont`.
//!
//! # Layout
//!
//! - [`cli`]: parser of the command line and exit code
//! - `commands`: one module for each command
//! - `deployment`: configuration file, cores, paths and registry of running deployments
//! - `client`: HTTP client of a gateway
//! - `models`, `home`: models on this machine by name, and models of a hub
//! - `terminal`, [`exit`]: output (data on stdout, all else on stderr) and errors with cause, reason and next
//!   command
//! - `fuzz_hooks`: entry points of the crate `fuzz` to the parsers
//! - `../python`: two programs that `pull` passes to a Python interpreter
//!
//! # Principles
//!
//! Commands use `client`, `deployment` and `models`. These modules use `terminal` and `exit`, and no
//! command.
//!
//! This crate does no tensor arithmetic and reads model files through the crates `model-files` and `model`
//! only. The other processes are known by their flags, their `ready` line and their HTTP API. Questions are
//! asked only at a terminal, and no command opens a connection to another host unless its name says so.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only this program and its tests use the items")]

pub mod cli;
mod client;
mod commands;
mod deployment;
pub mod exit;
#[doc(hidden)]
pub mod fuzz_hooks;
mod home;
mod models;
mod terminal;
